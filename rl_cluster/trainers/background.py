"""Coroutines in, results out: an event loop on a thread of its own, so that a front can be called plainly.

A notebook has a running event loop already; and between the calls the workers' tasks must go on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rl_cluster.errors import DeadlineError

T = TypeVar("T")


class BackgroundLoop:
    """`call` runs a coroutine to its end and returns its result or raises its error; `close` ends the thread.

    KeyboardInterrupt in `call` cancels the coroutine and is raised again.
    """

    def __init__(self, name: str = "rl-cluster") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], what: str = "", seconds: float | None = None) -> T:
        """seconds: after so many, DeadlineError that names `what`, and the coroutine is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise DeadlineError(f"{what}: the learner did not answer within {seconds:g} s") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """The second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        if unfinished := asyncio.all_tasks(self._loop):  # calls that missed their deadline
            for task in unfinished:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(unfinished, timeout=1.0))
        self._loop.close()
