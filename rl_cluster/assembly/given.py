"""What a caller in this process hands over as objects, where a recipe names files and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_cluster.config.reward import CallableScorer, RewardConfig
from rl_cluster.errors import BadInputError
from rl_cluster.loop.hooks import Hooks


@dataclass(frozen=True)
class Given:
    """scorers: name -> f(prompts, responses, metadata), for each CallableScorer of the configuration.

    environment: a factory f(tokenizer) -> RLEnvironment, for runs whose episodes an environment plays.
    hooks: told of every step, and may end the run.
    """

    scorers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    environment: Callable[..., Any] | None = None
    hooks: Sequence[Hooks] = ()


def check_given(rewards: RewardConfig, given: Given) -> None:
    """BadInputError where the configuration speaks of an object that nobody handed over."""
    for scorer in rewards.scorers:
        if isinstance(scorer, CallableScorer) and scorer.name not in given.scorers:
            raise BadInputError(
                f"rewards.scorers ({scorer.name}): kind callable stands for an object of the caller's, "
                "and none was handed over. In a recipe, use kind: function with an import path."
            )
