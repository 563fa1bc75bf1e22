"""Everything that does the loop's work, behind protocols, and waiting for it while generation may fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.loop.producer import Scoring
from rl_cluster.loop.report import Metrics
from rl_cluster.protocols import Learner, Reference, WeightPublisher

T = TypeVar("T")


class Turns(Protocol):
    """Engines and learner on the same GPUs: who has the memory. Only with max_policy_lag 0."""

    async def to_learner(self) -> None: ...

    async def to_engines(self) -> None: ...


@dataclass(frozen=True)
class Workers:
    """Everything that does the work, behind protocols. critic: a separate one, else None."""

    pool: RolloutPool
    scoring: Scoring
    learner: Learner
    publisher: WeightPublisher
    critic: Learner | None = None
    reference: Reference | None = None
    learner_is_reference: bool = False
    turns: Turns | None = None
    health: Callable[[], Awaitable[Metrics]] | None = None

    @asynccontextmanager
    async def learners_turn(self) -> AsyncIterator[None]:
        """Engines on the learner's GPUs sleep within and are awake afterwards; no failure wakes them."""
        if self.turns is not None:
            await self.turns.to_learner()
        yield
        if self.turns is not None:
            await self.turns.to_engines()


async def or_failure(work: Coroutine[Any, Any, T], failing: asyncio.Task[None] | None) -> T:
    """The result of `work`, unless the producer fails first: then its error, and `work` is cancelled."""
    if failing is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, failing}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            await failing
            raise AssertionError("the producer never ends by itself")
        return await task
    finally:
        task.cancel()
