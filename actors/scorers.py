"""The rewards section of a configuration in, its scorers on Ray workers out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from actors.reward_model_worker import make_reward_model_scorer
from actors.scorer_handle import RayScorer
from actors.scorer_worker import make_function_scorer
from rl_cluster.config.reward import RewardConfig, RewardModelScorer
from rl_cluster.rewards.loading import scorer_names


def make_scorers(
    rewards: RewardConfig,
    policy_tokenizer: Any,
    *,
    device: str = "cpu",
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    start_seconds: float = 600.0,
) -> tuple[RayScorer, ...]:
    """One scorer per entry, in order, not started yet; what can be checked here is (BadInputError).

    device, num_cpus, num_gpus: of each reward-model worker; function workers reserve no CPU.
    """
    scorers = []
    for config, name in zip(rewards.scorers, scorer_names(rewards.scorers), strict=True):
        if isinstance(config, RewardModelScorer):
            scorer = make_reward_model_scorer(
                config,
                name,
                policy_tokenizer,
                device=device,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                start_seconds=start_seconds,
            )
        else:
            scorer = make_function_scorer(config, name, start_seconds=start_seconds)
        scorers.append(scorer)
    return tuple(scorers)


async def start_scorers(scorers: Sequence[RayScorer]) -> None:
    """Start all at once; if one cannot start, end the others and raise its error."""
    results = await asyncio.gather(*(scorer.start() for scorer in scorers), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        await asyncio.gather(*(scorer.close() for scorer in scorers))
        raise errors[0]
