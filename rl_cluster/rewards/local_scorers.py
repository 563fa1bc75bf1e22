"""The rewards section of a configuration in, its scorers in this process out (no Ray)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_cluster.config.reward import (
    CallableScorer,
    EnvironmentScorer,
    FunctionScorer,
    RewardConfig,
    RewardModelScorer,
    ScorerConfig,
)
from rl_cluster.protocols import Scorer
from rl_cluster.rewards.episode_scorer import EpisodeScorer
from rl_cluster.rewards.function_process import ProcessScorer
from rl_cluster.rewards.loading import ScoreFunction, make_function, scorer_names
from rl_cluster.rewards.local_scorer import LocalScorer


def make_local_scorers(
    rewards: RewardConfig,
    policy_tokenizer: Any,
    *,
    functions: Mapping[str, ScoreFunction] | None = None,
    device: str = "cpu",
) -> tuple[Scorer, ...]:
    """One scorer per entry, in order. functions: name -> function, of the scorers of kind callable.

    BadInputError as load_function, load_reward_model and scorer_names.
    """
    names = scorer_names(rewards.scorers)
    pairs = zip(rewards.scorers, names, strict=True)
    return tuple(_make(config, name, policy_tokenizer, functions or {}, device) for config, name in pairs)


def _make(
    config: ScorerConfig,
    name: str,
    policy_tokenizer: Any,
    functions: Mapping[str, ScoreFunction],
    device: str,
) -> Scorer:
    if isinstance(config, CallableScorer):
        return LocalScorer(name, functions[name], config.weight, config.timeout_seconds)
    if isinstance(config, EnvironmentScorer):
        return EpisodeScorer(name, config.weight)
    if isinstance(config, FunctionScorer):
        return ProcessScorer(name, config)
    if not isinstance(config, RewardModelScorer):
        return LocalScorer(name, make_function(config), config.weight, config.timeout_seconds)
    # Only here: they import torch.
    from rl_cluster.rewards.local_reward_model import LocalRewardModel
    from rl_cluster.rewards.reward_model import load_reward_model

    model = load_reward_model(
        config.path,
        policy_tokenizer,
        tokens_per_batch=config.tokens_per_batch,
        dtype=config.dtype,
        device=device,
    )
    return LocalRewardModel(name, model, config.weight, config.timeout_seconds)
