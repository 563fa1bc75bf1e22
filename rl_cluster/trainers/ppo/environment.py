"""An environment of the caller's in; copies that follow it through several train() calls out.

Between two calls the caller may change the environment (set_difficulty): copies made before are then replaced
at their next episode.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from rl_cluster.environments.playing.for_runs import environment_factory
from rl_cluster.environments.playing.starting import start_environment
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt


def is_environment(value: Any) -> bool:
    """Whether it plays episodes: reset and step."""
    return all(callable(getattr(value, name, None)) for name in ("reset", "step"))


def check_environment_alone(reward_fn: Any, metadata: Any) -> None:
    """train(env) is paid by the environment: BadInputError for what nobody would read beside it."""
    if reward_fn is not None:
        raise BadInputError(
            "PPOTrainer.reward_fn: train(env) takes its rewards from the environment, so this one would "
            "never be called. Leave it out, or give it to the environment (TextGenerationEnv(reward_fn=...))."
        )
    if metadata is not None:
        raise BadInputError("metadata: goes with prompts; an environment brings its own. Leave it out.")


class EnvironmentSource:
    """Implements the factory of a run: f(tokenizer) -> an environment that nobody else uses."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.version = 0

    def renew(self, environment: Any) -> None:
        """From the next episodes on, this one is played as it is now."""
        self.environment = environment
        self.version += 1

    def __call__(self, tokenizer: Any) -> _Follower:
        return _Follower(self, tokenizer)


class _Follower:
    """One copy at a time of the source's environment, as RLEnvironment."""

    def __init__(self, source: EnvironmentSource, tokenizer: Any) -> None:
        self._source, self._tokenizer = source, tokenizer
        self._end_token_ids: Collection[int] = ()
        self._take()

    def _take(self) -> None:
        self._version = self._source.version
        self._own = environment_factory(self._source.environment)(self._tokenizer)
        self.take_end_tokens(self._end_token_ids)

    def take_end_tokens(self, end_token_ids: Collection[int]) -> None:
        self._end_token_ids = end_token_ids
        take = getattr(self._own, "take_end_tokens", None)
        if take is not None:
            take(end_token_ids)

    @property
    def wants_tokens(self) -> bool:
        return bool(getattr(self._own, "wants_tokens", False))

    def start(self, prompt: str, metadata: Mapping[str, Any], seed: int) -> Any:
        if self._version != self._source.version:
            self._take()
        return start_environment(self._own, Prompt("", np.zeros(0, np.int32), prompt, metadata), seed)

    def reset(self) -> Any:
        return self._own.reset()

    def step(self, action: Any) -> Any:
        return self._own.step(action)

    def truncate(self) -> Any:
        truncate = getattr(self._own, "truncate", None)
        return None if truncate is None else truncate()

    def close(self) -> None:
        close = getattr(self._own, "close", None)
        if close is not None:
            close()


def temperature_of(environment: Any) -> float | None:
    """What the environment's actions are to be sampled with; None: it does not say."""
    value = getattr(environment, "temperature", None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadInputError(f"{type(environment).__name__}.temperature={value!r}: must be a number above 0.")
    return float(value)
