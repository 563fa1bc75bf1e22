from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from rl_cluster.rewards.batch_queue import BatchQueue


def request(*values: float) -> list[np.ndarray]:
    return [np.array([value]) for value in values]


async def test_requests_made_while_a_call_runs_share_the_next_one() -> None:
    first_runs, go_on = threading.Event(), threading.Event()
    calls: list[list[float]] = []

    def negate(sequences: Sequence[np.ndarray]) -> np.ndarray:
        calls.append([float(sequence[0]) for sequence in sequences])
        if len(calls) == 1:
            first_runs.set()
            assert go_on.wait(30)
        return np.array([-float(sequence[0]) for sequence in sequences])

    queue = BatchQueue(negate)
    first = asyncio.create_task(queue.score(request(1)))
    await asyncio.to_thread(first_runs.wait, 30)
    later = [asyncio.create_task(queue.score(request(*values))) for values in ((2, 3), (4,), (5, 6))]
    await asyncio.sleep(0)
    go_on.set()
    answers = [answer.tolist() for answer in await asyncio.gather(first, *later)]
    assert answers == [[-1], [-2, -3], [-4], [-5, -6]]
    assert calls == [[1], [2, 3, 4, 5, 6]]


async def test_an_error_reaches_those_who_shared_the_call_and_nobody_after_them() -> None:
    def refuses_zero(sequences: Sequence[np.ndarray]) -> np.ndarray:
        values = np.array([float(sequence[0]) for sequence in sequences])
        if 0 in values:
            raise ValueError("zero")
        return values

    queue = BatchQueue(refuses_zero)
    results = await asyncio.gather(queue.score(request(0)), queue.score(request(1)), return_exceptions=True)
    assert [str(result) for result in results] == ["zero", "zero"]
    assert (await queue.score(request(1))).tolist() == [1]
    with pytest.raises(ValueError, match="zero"):
        await queue.score(request(0))
