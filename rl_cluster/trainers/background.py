"""Coroutines in, results out: an event loop on a thread of its own, so that a front can be called plainly.

A notebook has a running event loop already; and between the calls the workers' tasks must go on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """`call` runs a coroutine to its end and returns its result or raises its error; `close` ends the thread.

    KeyboardInterrupt in `call` cancels the coroutine, waits for its clean-up and is raised again.
    """

    def __init__(self, name: str = "rl-cluster") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(_held(work), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """The second call does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _held(work: Coroutine[Any, Any, T]) -> T:
    return await work
