"""Evaluation on held-out prompts: the same workers and scorers, no shaping, no training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_cluster.algorithms.sampling import pass_at_k
from rl_cluster.config.data import EvalConfig
from rl_cluster.data.randomness import sample_seeds
from rl_cluster.errors import ScorerError
from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.loop.episodes import roll_out
from rl_cluster.loop.producer import Scoring
from rl_cluster.trajectory import GroupTask, Prompt, SamplingSpec, ScoreFailure


@dataclass(frozen=True)
class EvalResult:
    """metrics: eval/… as they are logged."""

    metrics: dict[str, float | None]


class Evaluator:
    """The held-out prompts with fixed seeds: every evaluation of a run asks exactly the same."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSpec,
        config: EvalConfig,
        seed: int,
        pool: RolloutPool,
        scoring: Scoring,
    ) -> None:
        self._config = config
        self._pool = pool
        self._scoring = scoring
        self._tasks = [
            GroupTask(-1 - i, prompt, sample_seeds(seed, -1 - i, config.samples_per_prompt), sampling)
            for i, prompt in enumerate(prompts[: config.num_prompts])
        ]

    async def run(self) -> EvalResult:
        """Raises ScorerError when a group cannot be scored: an evaluation with holes is not comparable."""
        answers = await asyncio.gather(*(self._one(task) for task in self._tasks))
        scores = np.stack([values for values, _ in answers])
        lengths = np.concatenate([counts for _, counts in answers])
        known = ~np.isnan(scores)
        if not known.any():
            raise ScorerError("rewards", "no scorer gave any sample of the evaluation a reward (all None)")
        correct = scores >= self._config.success_threshold
        metrics: dict[str, float | None] = {
            "eval/score_mean": float(scores[known].mean()),
            "eval/accuracy": float(correct[known].mean()),
            "eval/mean_length": float(lengths.mean()),
        }
        for k in self._config.pass_at:
            metrics[f"eval/pass@{k}"] = _mean_pass_at(k, known.sum(axis=1), correct.sum(axis=1))
        return EvalResult(metrics)

    async def _one(self, task: GroupTask) -> tuple[np.ndarray, np.ndarray]:
        """The group's scores, float64 [samples], and how many tokens each sample drew."""
        played = await roll_out(self._pool, task, self._scoring.policy)
        if isinstance(played, ScoreFailure):
            raise _no_holes(played)
        summary, group = played
        scores = await self._scoring.score(group)
        if isinstance(scores, ScoreFailure):
            raise _no_holes(scores)
        self._scoring.warn_of_missing(task.prompt.prompt_id, scores)
        return self._scoring.weighted_sum(scores), np.array(summary.action_counts)


def _mean_pass_at(k: int, known: np.ndarray, correct: np.ndarray) -> float | None:
    """Over the prompts with at least k samples that have a reward; known, correct: samples per prompt."""
    values = [pass_at_k(int(n), int(c), k) for n, c in zip(known, correct, strict=True) if n >= k]
    return float(np.mean(values)) if values else None


def _no_holes(failure: ScoreFailure) -> ScorerError:
    return ScorerError(
        failure.name, f"{failure.kind} during evaluation: {failure.message}\n{failure.traceback}"
    )
