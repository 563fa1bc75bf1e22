"""Groups become a batch, and a batch gets its advantages: columns and numbers by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_cluster.config.algorithm import GRPO, PPO, RLOO, KLConfig
from rl_cluster.loop.experience import add_advantages, assemble, sample_texts
from rl_cluster.protocols import ForwardOutput
from rl_cluster.trajectory import Prompt, Trajectory, TrajectoryGroup


def trajectory(prompt: int, behaviour: list[float], versions: list[int], reason: Any = "stop") -> Trajectory:
    count = len(behaviour)
    return Trajectory(
        tokens=np.arange(prompt + count, dtype=np.int32),
        action_mask=np.arange(prompt + count) >= prompt,
        behaviour_logprobs=np.array([0.0] * prompt + behaviour, dtype=np.float32),
        policy_versions=np.array([-1] * prompt + versions, dtype=np.int32),
        finish_reason=reason,
        response_text=f"response of {count}",
        ended_with_eos=reason == "stop",
    )


def groups() -> list[TrajectoryGroup]:
    prompt = Prompt("row", np.array([0, 1], dtype=np.int32), "what?")
    first = (trajectory(2, [-1.0, -2.0], [3, 3]), trajectory(2, [-0.5], [4], "length"))
    second = (trajectory(2, [-3.0, -1.0, -1.0], [4, 4, 4]), trajectory(2, [-4.0], [3]))
    return [TrajectoryGroup(8, prompt, first), TrajectoryGroup(6, prompt, second)]


def of_actions(batch: Any, values: list[float]) -> np.ndarray:
    column = np.zeros(len(batch.tokens), dtype=np.float32)
    column[batch.action_mask] = values
    return column


def test_groups_lie_end_to_end_with_their_reference() -> None:
    references = [np.arange(7, dtype=np.float32), 10 + np.arange(8, dtype=np.float32)]
    layout, batch = assemble(2, False, *groups(), *references)
    assert layout.lengths == (4, 3, 5, 3)
    assert layout.action_counts == (2, 1, 3, 1)
    assert layout.group_ids == (8, 8, 6, 6) == tuple(batch.group_ids)
    assert batch.tokens.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.behaviour_logprobs is not None and batch.reference_logprobs is not None
    assert batch.behaviour_logprobs[batch.action_mask].tolist() == [-1, -2, -0.5, -3, -1, -1, -4]
    assert batch.reference_logprobs.tolist() == [*range(7), *range(10, 18)]
    assert assemble(2, False, *groups())[1].reference_logprobs is None


def test_truncated_samples_have_nothing_to_train_where_they_are_masked() -> None:
    layout, batch = assemble(2, True, *groups())
    assert layout.action_counts == (2, 0, 3, 1)
    assert batch.action_counts.tolist() == [2, 1, 3, 1], "the batch itself keeps them"


SCORES = np.array([1.0, 3.0, 5.0, 2.0])
POLICY = [-1.5, -2.0, -0.75, -3.0, -1.25, -1.0, -3.0]


def test_without_a_pass_before_the_update_the_behaviour_is_the_policy() -> None:
    _, batch = assemble(2, False, *groups())
    stats, batch = add_advantages(GRPO(scale="none"), SCORES, 0.0, batch, None, None, None)
    assert batch.advantages is not None
    assert batch.advantages[batch.action_mask] == pytest.approx([-1, -1, 1, 1.5, 1.5, 1.5, -1.5])
    assert not batch.advantages[~batch.action_mask].any()
    assert stats.entropy.tolist() == [3.0, 0.5, 5.0, 4.0]
    assert (stats.kl, stats.gap_mean, stats.gap_max, stats.drift_mean) == (None, None, None, None)
    assert batch.proximal_logprobs is None and batch.values is None and batch.returns is None


def test_the_gap_is_of_tokens_of_this_version_and_the_drift_of_older_ones() -> None:
    _, batch = assemble(2, False, *groups())
    policy = ForwardOutput(of_actions(batch, POLICY), of_actions(batch, [9.0] * 7))
    stats, after = add_advantages(GRPO(), SCORES, 0.0, batch, None, policy, None, version=4)
    assert (stats.gap_mean, stats.gap_max) == pytest.approx(((0.25 + 0 + 0.25 + 0) / 4, 0.25))
    assert (stats.drift_mean, stats.drift_max) == pytest.approx(((0.5 + 0 + 1) / 3, 1.0))
    assert stats.entropy.tolist() == pytest.approx([3.5, 0.75, 5.25, 3.0])
    assert after.proximal_logprobs is not None
    assert after.proximal_logprobs[after.action_mask] == pytest.approx(POLICY)
    stats, _ = add_advantages(GRPO(), SCORES, 0.0, batch, None, policy, None)
    assert (stats.gap_mean, stats.gap_max) == pytest.approx(((0.5 + 0 + 0.25 + 0 + 0.25 + 0 + 1) / 7, 1.0))
    assert (stats.drift_mean, stats.drift_max) == (None, None)


def test_a_penalty_in_the_reward_compares_the_pass_before_the_update_with_the_reference() -> None:
    _, batch = assemble(2, False, *groups())
    policy = ForwardOutput(of_actions(batch, POLICY), of_actions(batch, [0.0] * 7))
    reference = ForwardOutput(of_actions(batch, [-1.0] * 7), of_actions(batch, [0.0] * 7))
    algorithm = RLOO(kl=KLConfig(coef=0.7, place="reward_sequence", estimator="k1"))
    stats, batch = add_advantages(algorithm, SCORES, 0.5, batch, reference, policy, None)
    kl = np.array([-1.5, 0.25, -2.25, -2.0])
    assert stats.kl is not None
    assert stats.kl == pytest.approx(kl)
    assert stats.non_score_reward == pytest.approx(-0.5 * kl)
    rewards = SCORES - 0.5 * kl
    first, second = rewards[0] - rewards[1], rewards[2] - rewards[3]
    expected = [first, first, -first, second, second, second, -second]
    assert batch.advantages is not None and batch.reference_logprobs is not None
    assert batch.advantages[batch.action_mask] == pytest.approx(expected)
    assert batch.reference_logprobs[batch.action_mask].tolist() == [-1.0] * 7


@pytest.mark.parametrize("separate", [False, True])
def test_values_are_the_critics_or_those_of_the_pass_that_shares_its_trunk(separate: bool) -> None:
    _, batch = assemble(2, False, *groups())
    logprobs, zeros = of_actions(batch, POLICY), of_actions(batch, [0.0] * 7)
    own, other = of_actions(batch, [0.5] * 7), of_actions(batch, [0.25] * 7)
    policy = ForwardOutput(logprobs, zeros, own)
    critic = ForwardOutput(zeros, zeros, other) if separate else None
    algorithm = PPO(gamma=1.0, lam=1.0, kl=KLConfig(), whiten_advantages=False)
    _, batch = add_advantages(algorithm, SCORES, 0.0, batch, None, policy, critic)
    value = 0.25 if separate else 0.5
    assert batch.values is not None and batch.returns is not None and batch.advantages is not None
    assert batch.values[batch.action_mask].tolist() == [value] * 7
    returns = np.array([1, 1, 3, 5, 5, 5, 2], dtype=np.float64)
    assert batch.returns[batch.action_mask] == pytest.approx(returns)
    assert batch.advantages[batch.action_mask] == pytest.approx(returns - value)


def test_the_table_of_samples_shows_the_first_of_each_group() -> None:
    texts = sample_texts(*groups())
    assert [(text.prompt, text.response) for text in texts] == [
        ("what?", "response of 2"),
        ("what?", "response of 3"),
    ]
