"""The divergence measured in a step goes in, the coefficient β for the next step comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from rl_cluster.config.algorithm import KLConfig
from rl_cluster.errors import CheckpointError


class KLController(Protocol):
    coef: float

    def update(self, current: float, num_sequences: int) -> float:
        """current: mean sequence KL in nats. Returns the new coefficient."""
        ...

    def state(self) -> dict[str, float]: ...

    def load(self, state: Mapping[str, float]) -> None: ...


class FixedKL:
    """β stays what it was."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, current: float, num_sequences: int) -> float:
        return self.coef

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load(self, state: Mapping[str, float]) -> None:
        self.coef = _coef_of(state)


class AdaptiveKL:
    """β ← β · (1 + clip(KL / target − 1, ±0.2) · n / horizon); Ziegler et al. 2019, section 2.2."""

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, current: float, num_sequences: int) -> float:
        assert math.isfinite(current), f"KL is {current}"
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_sequences / self.horizon
        return self.coef

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load(self, state: Mapping[str, float]) -> None:
        self.coef = _coef_of(state)


CONTROLLERS: dict[str, Callable[[KLConfig], KLController]] = {
    "fixed": lambda kl: FixedKL(kl.coef),
    "adaptive": lambda kl: AdaptiveKL(kl.coef, kl.target, kl.horizon),
}


def kl_controller(kl: KLConfig) -> KLController:
    """The controller that the configuration names."""
    return CONTROLLERS[kl.controller](kl)


def _coef_of(state: Mapping[str, float]) -> float:
    coef = state.get("coef")
    if coef is None or not math.isfinite(coef):
        raise CheckpointError(
            f"KL controller: a finite `coef` was expected in the checkpoint, found {dict(state)}"
        )
    return float(coef)
