"""The tables: every config class and step has its function, and steps say what the config says."""

import pickle
from typing import get_args

import numpy as np
import pytest
import torch

from rl_cluster.algorithms.fit_table import fit_step
from rl_cluster.algorithms.inputs import LossInputs
from rl_cluster.algorithms.table import (
    ADVANTAGES,
    LOSSES,
    AdvantageInputs,
    CrossEntropyStep,
    PolicyStep,
    ValueStep,
    compute_advantages,
    compute_loss,
    critic_of,
    needs_critic,
    needs_reference,
    policy_step,
    value_step,
)
from rl_cluster.batch import TokenBatch
from rl_cluster.config.algorithm import GRPO, PPO, RLOO, AlgorithmConfig, CriticConfig, KLConfig, Reinforce
from rl_cluster.config.fit import DPO, KTO, ORPO, RewardObjective


def test_every_algorithm_of_the_configuration_has_a_line_in_the_table():
    assert set(ADVANTAGES) == set(get_args(get_args(AlgorithmConfig)[0]))


def test_only_ppo_has_a_critic():
    assert [needs_critic(config) for config in (PPO(), RLOO(), GRPO(), Reinforce())] == [
        True,
        False,
        False,
        False,
    ]
    assert critic_of(PPO()) == CriticConfig()
    assert critic_of(GRPO()) is None


def test_a_reference_is_needed_only_when_beta_is_above_0():
    assert needs_reference(RLOO())
    assert not needs_reference(GRPO())
    assert needs_reference(GRPO(kl=KLConfig(coef=0.01)))


def test_steps_survive_a_trip_to_another_process():
    steps = [policy_step(PPO(), temperature=0.7, kl_coef=0.1), ValueStep(0.3, 0.7), CrossEntropyStep()]
    steps += [fit_step(objective, 0.5) for objective in (DPO(), ORPO(), KTO(), RewardObjective())]
    assert [pickle.loads(pickle.dumps(step)) for step in steps] == steps
    assert set(LOSSES) == {type(step) for step in steps}


def test_beta_enters_the_loss_only_where_the_configuration_places_it_there():
    in_loss = policy_step(GRPO(kl=KLConfig(coef=0.1)), temperature=1.0, kl_coef=0.2)
    in_reward = policy_step(RLOO(), temperature=1.0, kl_coef=0.2)
    assert (in_loss.kl_coef, in_loss.kl_estimator) == (0.2, "k3")
    assert in_reward.kl_coef == 0.0


def test_a_shared_critic_adds_its_loss_and_a_separate_one_does_not():
    shared = policy_step(
        PPO(critic=CriticConfig(value_coef=0.4, clip_value=0.3)), temperature=1.0, kl_coef=0.0
    )
    assert (shared.value_coef, shared.clip_value) == (0.4, 0.3)
    separate = CriticConfig(separate=True, clip_value=0.3)
    assert policy_step(PPO(critic=separate), temperature=1.0, kl_coef=0.0).value_coef == 0.0
    assert value_step(separate, 0.7) == ValueStep(0.3, 0.7)


def test_compute_advantages_and_compute_loss_reach_the_functions_of_the_table():
    batch = TokenBatch(
        tokens=np.zeros(4, np.int32),
        lengths=np.array([2, 2], np.int32),
        units=np.arange(2),
        group_ids=np.zeros(2),
        action_mask=np.array([False, True, False, True]),
    )
    out = compute_advantages(GRPO(scale="none"), AdvantageInputs(batch, np.array([0.0, 1.0]), 0.0))
    assert out.advantages.tolist() == [0, -0.5, 0, 0.5]
    inputs = LossInputs(
        torch.tensor([0, 1]),
        2,
        torch.tensor([-1.0, -1.0], requires_grad=True),
        torch.tensor([0.5, 0.5]),
        advantages=torch.tensor([-0.5, 0.5]),
    )
    assert compute_loss(CrossEntropyStep(), inputs).loss.item() == pytest.approx(1.0)
    step = PolicyStep(GRPO().loss, 1.0)
    assert compute_loss(step, inputs).metrics["ratio_sum"] == 2
