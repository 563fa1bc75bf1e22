"""The rewards section of a configuration in, its scorers on Ray workers out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from actors.reward_model_worker import make_reward_model_scorer
from actors.scorer_handle import RayScorer
from actors.scorer_worker import make_function_scorer
from rl_cluster.config.reward import CallableScorer, EnvironmentScorer, RewardConfig, RewardModelScorer
from rl_cluster.protocols import Ref, Scorer
from rl_cluster.ray_answers import CONTROL_SECONDS, answer
from rl_cluster.rewards.calling import Outcome
from rl_cluster.rewards.episode_scorer import EpisodeScorer
from rl_cluster.rewards.loading import ScoreFunction, scorer_names
from rl_cluster.rewards.local_scorer import LocalScorer


class DriverScorer:
    """Implements protocols.Scorer in the driver's own process, for functions that cannot travel and
    for what is only looked up in the group."""

    def __init__(self, local: Scorer) -> None:
        self.name, self.weight = local.name, local.weight
        self._local = local

    async def score(self, group: Ref) -> Outcome:
        here = await answer("the holder of a group", group, "handing it to a scorer", CONTROL_SECONDS)
        return await self._local.score(here)

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to end."""


AnyScorer = RayScorer | DriverScorer


def make_scorers(
    rewards: RewardConfig,
    policy_tokenizer: Any,
    *,
    functions: Mapping[str, ScoreFunction] | None = None,
    device: str = "cpu",
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    start_seconds: float = 600.0,
) -> tuple[AnyScorer, ...]:
    """One scorer per entry, in order, not started yet; what can be checked here is (BadInputError).

    functions: name -> function, of the scorers of kind callable. device, num_cpus, num_gpus: of each
    reward-model worker; function workers reserve no CPU.
    """
    scorers: list[AnyScorer] = []
    for config, name in zip(rewards.scorers, scorer_names(rewards.scorers), strict=True):
        scorer: AnyScorer
        if isinstance(config, CallableScorer):
            function = (functions or {})[name]
            scorer = DriverScorer(LocalScorer(name, function, config.weight, config.timeout_seconds))
        elif isinstance(config, EnvironmentScorer):
            scorer = DriverScorer(EpisodeScorer(name, config.weight))
        elif isinstance(config, RewardModelScorer):
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


async def start_scorers(scorers: Sequence[AnyScorer]) -> None:
    """Start all at once; if one cannot start, end the others and raise its error."""
    results = await asyncio.gather(*(scorer.start() for scorer in scorers), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        await asyncio.gather(*(scorer.close() for scorer in scorers))
        raise errors[0]
