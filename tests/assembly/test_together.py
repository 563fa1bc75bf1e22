"""Coroutines that ask at the same time share one call; errors and cancellation reach the right ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from rl_cluster.assembly.together import Together


class Work:
    """Doubles numbers; remembers the batches. Waits `ticks` turns of the event loop."""

    def __init__(self, ticks: int = 0) -> None:
        self.batches: list[list[int]] = []
        self.abandoned: list[bool] = []
        self._ticks = ticks

    async def __call__(self, items: Sequence[int], abandoned: Callable[[], bool]) -> list[int]:
        self.batches.append(list(items))
        for _ in range(self._ticks):
            await asyncio.sleep(0)
        self.abandoned.append(abandoned())
        if 13 in items:
            raise ValueError("unlucky")
        return [2 * item for item in items]


async def test_those_who_ask_at_the_same_time_are_answered_by_one_call() -> None:
    work = Work()
    together = Together(work)
    assert await asyncio.gather(*(together.ask(i) for i in range(5))) == [0, 2, 4, 6, 8]
    assert await together.ask(7) == 14
    assert work.batches == [[0, 1, 2, 3, 4], [7]]


async def test_those_who_come_meanwhile_are_the_next_batch_and_choose_limits_it() -> None:
    work = Work(ticks=20)
    together = Together(work, choose=lambda items: min(len(items), 2))
    first = [asyncio.create_task(together.ask(i)) for i in range(3)]
    for _ in range(8):
        await asyncio.sleep(0)
    late = asyncio.create_task(together.ask(9))
    assert await asyncio.gather(*first, late) == [0, 2, 4, 18]
    assert work.batches == [[0, 1], [2, 9]]


async def test_an_error_reaches_everybody_of_the_batch_and_nobody_else() -> None:
    together = Together(Work())
    answers = await asyncio.gather(together.ask(1), together.ask(13), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["unlucky", "unlucky"]
    assert await together.ask(2) == 4


async def test_work_learns_that_nobody_waits_any_more_and_goes_on_with_the_next() -> None:
    work = Work(ticks=20)
    together = Together(work)
    asking = [asyncio.create_task(together.ask(i)) for i in range(2)]
    for _ in range(8):
        await asyncio.sleep(0)
    asking[0].cancel()
    assert await asking[1] == 2
    gone = asyncio.create_task(together.ask(5))
    for _ in range(8):
        await asyncio.sleep(0)
    gone.cancel()
    assert await together.ask(6) == 12
    assert (work.batches, work.abandoned) == ([[0, 1], [5], [6]], [False, True, False])


async def test_closing_cancels_those_who_wait() -> None:
    together = Together(Work(ticks=1000))
    running = asyncio.create_task(together.ask(1))
    for _ in range(8):
        await asyncio.sleep(0)
    waiting = asyncio.create_task(together.ask(2))
    await asyncio.sleep(0)
    together.close()
    for task in (running, waiting):
        with pytest.raises(asyncio.CancelledError):
            await task
