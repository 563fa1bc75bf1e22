"""Two tables, and what is asked of them: an algorithm's config -> its advantages, a loss step -> its loss.

Called by the loop (advantages) and the learner's ranks (losses). Here and not in steps.py or fit_table.py,
which the driver's plans import, because the functions behind the tables need torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_cluster.algorithms.inputs import LossInputs, LossResult
from rl_cluster.algorithms.objectives import cross_entropy_objective, policy_objective, value_objective
from rl_cluster.algorithms.preference_objectives import (
    dpo_objective,
    kto_objective,
    orpo_objective,
    reward_objective,
)
from rl_cluster.algorithms.rules import (
    AdvantageInputs,
    AdvantageOutputs,
    grpo_advantages,
    ppo_advantages,
    reinforce_advantages,
    rloo_advantages,
)
from rl_cluster.algorithms.steps import (
    CrossEntropyStep,
    DPOStep,
    KTOStep,
    LossStep,
    ORPOStep,
    PolicyStep,
    RewardStep,
    ValueStep,
)
from rl_cluster.config.algorithm import GRPO, PPO, RLOO, AlgorithmConfig, CriticConfig, Reinforce, critic_of

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "AdvantageInputs",
    "AdvantageOutputs",
    "AdvantageRule",
    "CrossEntropyStep",
    "DPOStep",
    "KTOStep",
    "LossStep",
    "ORPOStep",
    "PolicyStep",
    "RewardStep",
    "ValueStep",
    "compares_within_group",
    "compute_advantages",
    "compute_loss",
    "critic_of",
    "needs_critic",
    "needs_reference",
    "policy_step",
    "value_step",
]


@dataclass(frozen=True)
class AdvantageRule:
    """needs_critic: the config then has a field `critic`. within_group(config): a sample is
    only ever compared with the others of its group, so that equal scores teach nothing."""

    compute: Callable[[Any, AdvantageInputs], AdvantageOutputs]
    needs_critic: bool = False
    within_group: Callable[[Any], bool] = lambda _: True


ADVANTAGES: dict[type, AdvantageRule] = {
    PPO: AdvantageRule(ppo_advantages, needs_critic=True, within_group=lambda _: False),
    RLOO: AdvantageRule(rloo_advantages),
    GRPO: AdvantageRule(grpo_advantages),
    Reinforce: AdvantageRule(
        reinforce_advantages, within_group=lambda config: config.baseline == "group_mean"
    ),
}

LOSSES: dict[type, Callable[[Any, LossInputs], LossResult]] = {
    PolicyStep: policy_objective,
    ValueStep: value_objective,
    CrossEntropyStep: cross_entropy_objective,
    DPOStep: dpo_objective,
    ORPOStep: orpo_objective,
    KTOStep: kto_objective,
    RewardStep: reward_objective,
}


def compute_advantages(config: AlgorithmConfig, inputs: AdvantageInputs) -> AdvantageOutputs:
    """The rule of the config's class; pure, so it can run wherever the batch lies (Learner.compute)."""
    return ADVANTAGES[type(config)].compute(config, inputs)


def compute_loss(step: LossStep, inputs: LossInputs) -> LossResult:
    """The loss of the step's class over one micro-batch."""
    return LOSSES[type(step)](step, inputs)


def needs_critic(config: AlgorithmConfig) -> bool:
    return ADVANTAGES[type(config)].needs_critic


def compares_within_group(config: AlgorithmConfig) -> bool:
    return ADVANTAGES[type(config)].within_group(config)


def needs_reference(config: AlgorithmConfig) -> bool:
    """At β = 0 nothing is compared with the reference, so none is loaded."""
    return config.kl.coef > 0


def policy_step(
    config: AlgorithmConfig,
    *,
    temperature: float,
    kl_coef: float,
    importance_cap: float | None = None,
    train_policy: bool = True,
    version: int | None = None,
) -> PolicyStep:
    """The policy's step under an algorithm. kl_coef: β now; it enters the loss only where `kl.place` is loss.

    A critic on the shared trunk adds its loss; a separate one has value_step. train_policy False: warm-up.
    """
    critic = critic_of(config)
    shared = critic is not None and not critic.separate
    return PolicyStep(
        loss=config.loss,
        temperature=temperature,
        kl_coef=kl_coef if config.kl.place == "loss" else 0.0,
        kl_estimator=config.kl.estimator,
        importance_cap=importance_cap,
        value_coef=critic.value_coef if critic is not None and shared else 0.0,
        clip_value=critic.clip_value if critic is not None else 0.2,
        train_policy=train_policy,
        version=version,
    )


def value_step(critic: CriticConfig, temperature: float) -> ValueStep:
    """The step of a separate critic."""
    return ValueStep(clip_value=critic.clip_value, temperature=temperature)
