"""When a run that looks alive is ill: limits whose crossing warns, and then ends the run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rl_cluster.config.base import Config


class FitHealthConfig(Config):
    """What every training can suffer from."""

    max_skipped_updates: PositiveInt = 5
    """End the run after so many updates in a row that were skipped: loss or gradient was not finite."""


class HealthConfig(FitHealthConfig):
    """And what reinforcement learning can."""

    max_logprob_gap: PositiveFloat | None = None
    """Nats: mean |engine's − learner's log-probability| of tokens drawn by the weights of now. A step above
    it warns, a second one in a row, or one above ten times as much, ends the run. None: 0.05 for float32, 0.2
    for bfloat16, divided by a temperature below 1, and at least 1 with top-p or top-k."""
    max_logprob_drift: PositiveFloat = 2.0
    """The same for tokens drawn by older weights (async.max_policy_lag above 0)."""
    no_signal_steps: NonNegativeInt = 2
    """Warn after so many steps in a row in which no rewards differ; 0: never."""
    collapse_window: NonNegativeInt = 5
    """Steps over which entropy, response length and rewards are averaged: the last ones are compared with the
    first ones of the process. 0: never."""
    collapse_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Warn when the last ones are at most this share of the first."""
