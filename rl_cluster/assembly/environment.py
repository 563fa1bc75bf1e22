"""A configuration and what the caller has handed over in, the factory of the run's environments out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_cluster.assembly.given import Given
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError

Factory = Callable[[Any], Any]
"""f(tokenizer) -> an environment; called once per episode that runs at the same time."""


def run_environment(config: RunConfig, given: Given) -> Factory | None:
    """None for runs without one. BadInputError for a function that cannot be imported, or none at all."""
    settings = config.rollout.environment
    if settings is None:
        if given.environment is not None:
            raise BadInputError(
                "rollout.environment is not set, and an environment was handed over. "
                "Set rollout.environment={}."
            )
        return None
    # Only here: it imports torch.
    from rl_cluster.environments.playing.for_runs import configured_factory

    return configured_factory(settings, given.environment)
