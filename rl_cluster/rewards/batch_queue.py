"""Requests from many callers in, gathered into one call at a time of a slow function; each its answer out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

ScoreSequences = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Token sequences -> float64 [n]."""


class BatchQueue:
    """While one call runs in a thread, new requests wait, and are then served together by the next."""

    def __init__(self, score: ScoreSequences) -> None:
        self._score = score
        self._waiting: list[tuple[Sequence[np.ndarray], asyncio.Future[np.ndarray]]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")
        self._serving: asyncio.Task[None] | None = None

    async def score(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """float64 [n], for these sequences; raises what the function raises."""
        future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append((sequences, future))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        # Requests made in the same turn of the event loop are gathered, too.
        await asyncio.sleep(0)
        while self._waiting:
            requests, self._waiting = self._waiting, []
            sequences = [sequence for request, _ in requests for sequence in request]
            try:
                scores = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._score, sequences
                )
            except Exception as error:  # noqa: BLE001 — handed to everybody who waits for it
                _refuse([future for _, future in requests], error)
            else:
                _answer(requests, scores)


def _refuse(futures: Sequence[asyncio.Future[np.ndarray]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _answer(
    requests: Sequence[tuple[Sequence[np.ndarray], asyncio.Future[np.ndarray]]], scores: np.ndarray
) -> None:
    start = 0
    for sequences, future in requests:
        if not future.done():
            future.set_result(scores[start : start + len(sequences)])
        start += len(sequences)
