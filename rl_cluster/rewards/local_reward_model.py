"""The Scorer protocol on a reward model in this process: a group in, its scores out, batched with others.

The forward pass runs in a thread; after a timeout it goes on there, and later groups wait for it.
"""

from __future__ import annotations

import asyncio
import time

from rl_cluster.protocols import Ref
from rl_cluster.rewards.batch_queue import BatchQueue
from rl_cluster.rewards.calling import Outcome, failure_of, read_answer
from rl_cluster.rewards.reward_model import RewardModel
from rl_cluster.trajectory import ScoreFailure


class LocalRewardModel:
    """Implements protocols.Scorer; a group's Ref is the TrajectoryGroup itself."""

    def __init__(
        self, name: str, model: RewardModel, weight: float = 1.0, timeout_seconds: float | None = None
    ) -> None:
        self.name = name
        self.weight = weight
        self._model = model
        self._queue = BatchQueue(model.score)
        self._timeout_seconds = timeout_seconds

    async def score(self, group: Ref) -> Outcome:
        start = time.perf_counter()
        deadline = asyncio.timeout(self._timeout_seconds)
        try:
            async with deadline:
                values = await self._queue.score(self._model.encode(group))
        except Exception as error:  # noqa: BLE001 — a typed failure, with its traceback, for the loop
            if deadline.expired():
                return ScoreFailure(self.name, "timeout", f"no answer within {self._timeout_seconds:g} s")
            return failure_of(self.name, error)
        return read_answer(self.name, values, (len(values),), time.perf_counter() - start)[0]
