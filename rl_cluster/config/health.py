"""When a run that looks alive is ill: limits whose crossing warns, and then ends the run."""

from __future__ import annotations

from pydantic import PositiveFloat

from rl_cluster.config.base import Config


class FitHealthConfig(Config):
    """What every training can suffer from."""


class HealthConfig(FitHealthConfig):
    """And what reinforcement learning can."""

    max_logprob_gap: PositiveFloat | None = None
    """Nats: mean |engine's − learner's log-probability| of tokens drawn by the weights of now. A step above
    it warns, the next one above it ends the run. None: 0.05 for float32, 0.5 for bfloat16."""
