"""The number of an update goes in, its learning rate comes out."""

from __future__ import annotations

import math

from rl_cluster.config.run import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of update `step` (0, 1, …) of `total_steps`.

    Warm-up rises linearly and reaches the full rate with update warmup_steps − 1, so no update has rate 0.
    Afterwards, with p = (step − warmup) / (total − warmup): constant 1, linear 1 − p,
    cosine (1 + cos πp) / 2.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    factor = {
        "constant": lambda: 1.0,
        "linear": lambda: 1.0 - progress,
        "cosine": lambda: 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[optimizer.schedule]()
    return optimizer.learning_rate * factor
