"""Which rollout worker takes a task: the one with the fewest samples outstanding."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rl_cluster.errors import DeadlineError
from rl_cluster.protocols import Ref, RolloutWorker
from rl_cluster.trajectory import GroupSummary, GroupTask


class RolloutPool:
    """Several rollout workers behind one `rollout`; ties go to the first, so dispatch is deterministic."""

    def __init__(self, workers: Sequence[RolloutWorker], deadline_seconds: float) -> None:
        assert workers
        self.workers = tuple(workers)
        self._deadline_seconds = deadline_seconds
        self._load = [0] * len(self.workers)

    async def rollout(self, task: GroupTask) -> tuple[GroupSummary, Ref]:
        """Raises DeadlineError naming the worker when the group takes too long."""
        index = min(range(len(self.workers)), key=lambda i: (self._load[i], i))
        worker = self.workers[index]
        self._load[index] += task.num_samples
        try:
            return await asyncio.wait_for(worker.rollout(task), self._deadline_seconds)
        except TimeoutError as error:
            raise DeadlineError(
                f"group {task.group_id} was not generated within rollout.deadline_seconds="
                f"{self._deadline_seconds:g} by {worker.name} ({self._load[index]} samples outstanding there)"
            ) from error
        finally:
            self._load[index] -= task.num_samples
