"""What a learner minimises in a forward_backward, as small frozen objects that travel; no torch here.

Each says its temperature (of the logits) and its aggregation: how the rows' tokens are weighted against each
other, unless the batch brings its own weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rl_cluster.algorithms.weights import Aggregation
from rl_cluster.config.algorithm import PolicyLossConfig


@dataclass(frozen=True)
class PolicyStep:
    """The policy-gradient loss and, on a shared trunk, the critic's.

    temperature: of the sampling; the learner divides its logits by it. kl_coef: β of the divergence from the
    reference *in the loss* (0 where the penalty is in the reward). importance_cap: truncation of the weight
    proximal / behaviour (decoupled objective), None: no such weight. value_coef above 0 adds the clipped
    value loss times value_coef. train_policy False: only the values learn (value warm-up), of a shared trunk
    only their head; with value_coef 0 too, nothing does. version: of the weights before the step; tells drift
    from mismatch in the metrics.
    """

    loss: PolicyLossConfig
    temperature: float
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "abs", "exact"] = "k3"
    importance_cap: float | None = None
    value_coef: float = 0.0
    clip_value: float = 0.2
    train_policy: bool = True
    version: int | None = None

    @property
    def aggregation(self) -> Aggregation:
        return self.loss.aggregation


@dataclass(frozen=True)
class ValueStep:
    """The clipped value loss of a separate critic."""

    clip_value: float = 0.2
    temperature: float = 1.0
    aggregation: ClassVar[Aggregation] = "token_mean"


@dataclass(frozen=True)
class CrossEntropyStep:
    """−Σ weights · log π: supervised learning."""

    temperature: float = 1.0
    aggregation: ClassVar[Aggregation] = "token_mean"


@dataclass(frozen=True)
class DPOStep:
    """Pairs (rows 2i and 2i + 1); preference.py has the formulas. temperature: of likelihoods, always 1."""

    beta: float = 0.1
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: float = 0.0
    reference_free: bool = False
    temperature: ClassVar[float] = 1.0
    aggregation: ClassVar[Aggregation] = "sequence_mean"


@dataclass(frozen=True)
class ORPOStep:
    """Pairs. coef: λ of the odds-ratio term."""

    coef: float = 0.1
    temperature: ClassVar[float] = 1.0
    aggregation: ClassVar[Aggregation] = "sequence_mean"


@dataclass(frozen=True)
class KTOStep:
    """Single rows with a label. z0: KL baseline of the whole optimizer step, in nats, at least 0."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    z0: float = 0.0
    temperature: ClassVar[float] = 1.0
    aggregation: ClassVar[Aggregation] = "sequence_mean"


@dataclass(frozen=True)
class RewardStep:
    """Pairs of scores. centre: weight of (r_chosen + r_rejected)²."""

    margin: float = 0.0
    centre: float = 0.0
    temperature: ClassVar[float] = 1.0
    aggregation: ClassVar[Aggregation] = "sequence_mean"


LossStep = PolicyStep | ValueStep | CrossEntropyStep | DPOStep | ORPOStep | KTOStep | RewardStep
