"""From prompts to ready groups: generation, then scoring and reference log-probabilities, all overlapping."""

from __future__ import annotations

import asyncio
import itertools
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from rl_cluster.algorithms.sampling import has_signal
from rl_cluster.loop.buffer import ExperienceBuffer, ReadyGroup, StageTimes
from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.loop.episodes import roll_out
from rl_cluster.protocols import Ref, Reference, Scorer
from rl_cluster.rewards.failures import FailurePolicy, FailureWindow, first_failure
from rl_cluster.rewards.shaping import sum_out_of_range, weighted_sum
from rl_cluster.trajectory import GroupTask, ScoreFailure, Scores

MAX_WARNINGS = 3
"""Samples without any reward are warned of so many times; afterwards the metric counts them."""


class Scoring:
    """All scorers on one group, with retries; dropped groups are counted, and too many stop the run."""

    def __init__(self, scorers: Sequence[Scorer], policy: FailurePolicy) -> None:
        self.scorers = tuple(scorers)
        self.weights = {scorer.name: scorer.weight for scorer in self.scorers}
        self.failures = FailureWindow(policy)
        self.policy = policy
        self._warnings_left = MAX_WARNINGS

    async def score(self, group: Ref) -> tuple[Scores, ...] | ScoreFailure:
        """One Scores per scorer, or the failure that remained after the last attempt."""
        results = await asyncio.gather(*(self._with_retries(scorer, group) for scorer in self.scorers))
        failure = first_failure(results)
        scores = tuple(result for result in results if isinstance(result, Scores))
        failure = failure or sum_out_of_range({s.name: s.values for s in scores}, self.weights)
        self.failures.record(failure)
        return failure or scores

    async def _with_retries(self, scorer: Scorer, group: Ref) -> Scores | ScoreFailure:
        for attempt in itertools.count(1):
            result = await scorer.score(group)
            if isinstance(result, Scores) or self.policy.action(attempt) == "drop":
                return result
        raise AssertionError("unreachable")

    def weighted_sum(self, scores: Sequence[Scores]) -> np.ndarray:
        """float64 [n]: sum over scorers of weight × value, NaN where no scorer has a reward."""
        return weighted_sum({s.name: s.values for s in scores}, self.weights)

    def warn_of_missing(self, prompt_id: str, scores: Sequence[Scores]) -> None:
        """Samples that every scorer answered None for, as TRL's trainers do."""
        missing = np.flatnonzero(np.isnan(self.weighted_sum(scores)))
        if not len(missing) or not self._warnings_left:
            return
        self._warnings_left -= 1
        warnings.warn(
            f"All reward functions returned None for {len(missing)} of the {len(scores[0].values)} samples "
            f"of {prompt_id}, the first: sample {missing[0]} ({', '.join(s.name for s in scores)}). They are "
            "in no baseline and no mean, and their advantage is 0. Make sure that at least one reward "
            "function answers for each sample.",
            stacklevel=2,
        )


class Producer:
    """Keeps as many groups under way as the buffer admits."""

    def __init__(
        self,
        *,
        next_task: Callable[[], GroupTask],
        pool: RolloutPool,
        scoring: Scoring,
        reference: Reference | None,
        buffer: ExperienceBuffer,
        dynamic_sampling: bool,
    ) -> None:
        self._next_task = next_task
        self._pool = pool
        self._scoring = scoring
        self._reference = reference
        self._buffer = buffer
        self._dynamic_sampling = dynamic_sampling
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled; the first failure of any group ends it with that failure."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def watch(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() and not failed.done():
                failed.set_exception(task.exception())  # type: ignore[arg-type]

        admission = asyncio.create_task(self._admit(watch))
        try:
            done, _ = await asyncio.wait({admission, failed}, return_when=asyncio.FIRST_COMPLETED)
            await done.pop()
        finally:
            admission.cancel()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(admission, *self._tasks, return_exceptions=True)

    async def _admit(self, watch: Callable[[asyncio.Task[None]], None]) -> None:
        while True:
            await self._buffer.wait_for_slot()
            task = self._next_task()
            self._buffer.admit(task.group_id)
            running = asyncio.create_task(self._produce(task), name=f"group {task.group_id}")
            self._tasks.add(running)
            running.add_done_callback(watch)

    async def _produce(self, task: GroupTask) -> None:
        begun = time.perf_counter()
        played = await roll_out(self._pool, task, self._scoring.policy)
        if isinstance(played, ScoreFailure):
            self._scoring.failures.record(played)
            await self._buffer.drop(task.group_id, f"environment {played.kind}: {played.message}")
            return
        summary, group = played
        generated = time.perf_counter()
        reference_task = asyncio.create_task(self._reference_logprobs(group))
        try:
            scores = await self._scoring.score(group)
            scored = time.perf_counter()
            if isinstance(scores, ScoreFailure):
                await self._buffer.drop(
                    task.group_id, f"scorer {scores.name} {scores.kind}: {scores.message}"
                )
                return
            self._scoring.warn_of_missing(summary.prompt_id, scores)
            if self._dynamic_sampling and not has_signal(self._scoring.weighted_sum(scores)):
                await self._buffer.drop(task.group_id, "no signal: all scores of the group are equal")
                return
            reference = await reference_task
        finally:
            reference_task.cancel()
        times = StageTimes(begun, generated, scored, time.perf_counter())
        await self._buffer.put(ReadyGroup(summary, group, reference, scores, times))

    async def _reference_logprobs(self, group: Ref) -> Ref | None:
        return await self._reference.logprobs(group) if self._reference else None
