"""A fit's objective (config/fit.py) in, what the learner minimises out; no torch. Adding one is a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_cluster.algorithms.steps import (
    CrossEntropyStep,
    DPOStep,
    KTOStep,
    LossStep,
    ORPOStep,
    RewardStep,
)
from rl_cluster.config.fit import DPO, KTO, ORPO, SFT, Objective, RewardObjective

STEPS: dict[type, Callable[[Any, float], LossStep]] = {
    SFT: lambda objective, z0: CrossEntropyStep(),
    DPO: lambda objective, z0: DPOStep(
        objective.beta, objective.loss, objective.label_smoothing, objective.reference_free
    ),
    ORPO: lambda objective, z0: ORPOStep(objective.coef),
    KTO: lambda objective, z0: KTOStep(
        objective.beta, objective.desirable_weight, objective.undesirable_weight, z0
    ),
    RewardObjective: lambda objective, z0: RewardStep(objective.margin, objective.centre),
}

REFERENCE: dict[type, Callable[[Any], bool]] = {
    DPO: lambda objective: not objective.reference_free,
    KTO: lambda objective: True,
}


def fit_step(objective: Objective, z0: float = 0.0) -> LossStep:
    """z0: KTO's KL baseline of the optimizer step; the others ignore it."""
    return STEPS[type(objective)](objective, z0)


def compares_with_reference(objective: Objective) -> bool:
    """Whether the loss needs the log-probabilities of a frozen reference."""
    return type(objective) in REFERENCE and REFERENCE[type(objective)](objective)


def reference_model(objective: Objective) -> str | None:
    """The reference's own folder; None: the model as it is before its first update, or no reference."""
    return objective.reference_model if isinstance(objective, DPO | KTO) else None
