"""Checks of rollout.environment: does it belong to the rest, and do the episodes fit the model."""

from __future__ import annotations

from collections.abc import Iterator

from rl_cluster.config.checks.data import function_problems
from rl_cluster.config.planning.derive import max_prompt_tokens
from rl_cluster.config.planning.machine import Machine
from rl_cluster.config.planning.model_shape import find_shape
from rl_cluster.config.reading.problems import Problem
from rl_cluster.config.reward import EnvironmentScorer
from rl_cluster.config.run import RunConfig


def environment_is_named(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    environment = config.rollout.environment
    if environment is None:
        return
    if environment.function is not None:
        yield from function_problems("rollout.environment.function", environment.function)
    elif environment.options:
        reason = "are for rollout.environment.function, which is not set"
        yield Problem("rollout.environment.options", environment.options, reason, "Name the function.")


def environment_pays(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """The scorer of kind environment reads what an environment has paid."""
    if config.rollout.environment is not None:
        return
    for i, scorer in enumerate(config.rewards.scorers):
        if isinstance(scorer, EnvironmentScorer):
            reason = "reads what rollout.environment pays, and the run has none"
            remedy = "Set rollout.environment.function, or use another scorer."
            yield Problem(f"rewards.scorers.{i}.kind", scorer.kind, reason, remedy)


def episodes_fit(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    environment = config.rollout.environment
    if environment is None or environment.max_episode_tokens is None:
        return
    field, tokens = "rollout.environment.max_episode_tokens", environment.max_episode_tokens
    if tokens < config.rollout.max_new_tokens:
        reason = (
            f"is less than rollout.max_new_tokens = {config.rollout.max_new_tokens}, one response's limit"
        )
        yield Problem(field, tokens, reason, "Raise it, or lower rollout.max_new_tokens.")
    if config.model.path is None and config.model.scratch is None:
        return
    shape = find_shape(config.model)
    if shape is None or shape.max_positions is None:
        return
    prompt = max_prompt_tokens(config)
    if prompt + tokens > shape.max_positions:
        reason = f"with prompts of {prompt} tokens exceeds the model's {shape.named_positions}"
        yield Problem(field, tokens, reason, "Lower it or data.max_prompt_tokens.")


ENVIRONMENT_CHECKS = (environment_is_named, environment_pays, episodes_fit)
