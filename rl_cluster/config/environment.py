"""The environment that plays in the episodes of a run."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveFloat, PositiveInt

from rl_cluster.config.base import Config


class EnvironmentConfig(Config):
    """`rollout.environment`. Each episode that runs at the same time has an environment of its own."""

    function: str | None = None
    """f(tokenizer, **options) -> environment: `package.module:function`, or `path/to/file.py:function`.
    None: the caller of the library hands the environment over."""
    options: dict[str, Any] = {}
    """Passed as keyword arguments."""
    max_turns: PositiveInt = 16
    """Responses per episode; the environment's answer to the last one is not awaited any more."""
    max_episode_tokens: PositiveInt | None = None
    """Tokens of an episode after its prompt, the environment's included; default: rollout.max_new_tokens,
    which also limits each response."""
    timeout_seconds: PositiveFloat = 60.0
    """For one reset or step."""
