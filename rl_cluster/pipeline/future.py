"""Calls go in, futures come out: one thread per model runs its calls one after another, as submitted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rl_cluster.errors import PipelineError, ResultTimeoutError


class AsyncTrainingFuture:
    """The result of one call, now or later. Also awaitable: `output = await future`."""

    def __init__(self, future: Future[Any], label: str = "the call", lane: Lane | None = None) -> None:
        self._future = future
        self._label = label
        self._lane = lane

    def result(self, timeout: float | None = None) -> Any:
        """Wait at most `timeout` seconds (None: as long as it takes) and return what the call returned.

        Raises what the call raised, ResultTimeoutError (a TimeoutError; the call goes on), or
        concurrent.futures.CancelledError after cancel().
        """
        self._refuse_deadlock()
        try:
            return self._future.result(timeout)
        except TimeoutError:
            if self._future.done():
                raise  # the call's own
            raise ResultTimeoutError(self._late(timeout)) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, or None; waits like result()."""
        self._refuse_deadlock()
        try:
            return self._future.exception(timeout)
        except TimeoutError:
            raise ResultTimeoutError(self._late(timeout)) from None

    def done(self) -> bool:
        """True once the call has returned, raised or been cancelled."""
        return self._future.done()

    def cancel(self) -> bool:
        """True if the call had not begun and now never will; False if it runs or is over."""
        return self._future.cancel()

    def cancelled(self) -> bool:
        return self._future.cancelled()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()

    def _late(self, timeout: float | None) -> str:
        state = "is still running" if self._future.running() else "waits for the calls before it"
        return f"{self._label} {state}; no result within timeout={timeout} s"

    def _refuse_deadlock(self) -> None:
        if self._lane is not None and self._lane.is_current() and not self._future.done():
            raise PipelineError(
                f"{self._label}: result() was asked for inside another call of the same pipeline, which "
                "would "
                "wait for itself; ask for it outside of the loss function"
            )


class Lane:
    """The thread of one model. It starts with the first call and ends with shutdown()."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False
        # The thread must not refer to this object: a lane that is forgotten then ends its thread.
        self._thread: list[int] = []
        self._executor = ThreadPoolExecutor(
            1, f"rl_cluster-{name}", initializer=_note_thread, initargs=(self._thread,)
        )

    def submit(self, label: str, call: Callable[[], Any]) -> AsyncTrainingFuture:
        """Queue `call`; from any thread."""
        with self._lock:
            if self._closed:
                raise PipelineError(f"{label}: the pipeline is shut down; create a new one")
            self._count += 1
            future = self._executor.submit(call)
        return AsyncTrainingFuture(future, f"{label} (call {self._count} of {self._name})", self)

    def run(self, label: str, call: Callable[[], Any]) -> Any:
        """Queue `call` and wait for it."""
        if self.is_current():
            raise PipelineError(
                f"{label}: called inside another call of the same pipeline, it would wait for itself"
            )
        return self.submit(label, call).result()

    def is_current(self) -> bool:
        """True on the lane's own thread."""
        return threading.get_ident() in self._thread

    def shutdown(self, cancel_pending: bool = False) -> None:
        """Finish what is queued (or cancel it), then end the thread. May be called twice."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=not self.is_current(), cancel_futures=cancel_pending)


def _note_thread(place: list[int]) -> None:
    place.append(threading.get_ident())
