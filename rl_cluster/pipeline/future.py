"""Calls go in, futures come out: one thread runs a pipeline's calls one after another, as submitted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

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
                f"{self._label}: result() was asked for inside another call of the same model, which would "
                "wait for itself; ask for it outside of the loss function"
            )


class Turn:
    """Held by the one call that works on a model. Two pipelines over one module take turns; re-entrant."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
        self._lock.release()

    def is_mine(self) -> bool:
        """True on the thread that holds it."""
        return self._holder == threading.get_ident()


_TURNS: WeakKeyDictionary[nn.Module, Turn] = WeakKeyDictionary()
_TURNS_LOCK = threading.Lock()


def turn_of(model: Any) -> Turn:
    """One per module, however many pipelines work on it. A learner on a cluster orders its calls itself."""
    if not isinstance(model, nn.Module):
        return Turn()
    with _TURNS_LOCK:
        return _TURNS.setdefault(model, Turn())


class Lane:
    """The thread of one pipeline. It starts with the first call and ends with shutdown().

    turn: held while a call runs.
    """

    def __init__(self, name: str, turn: Turn) -> None:
        self._name = name
        self._turn = turn
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False
        # The thread must not refer to this object: a lane that is forgotten then ends its thread.
        self._executor = ThreadPoolExecutor(1, f"rl_cluster-{name}")

    def submit(self, label: str, call: Callable[[], Any]) -> AsyncTrainingFuture:
        """Queue `call`; from any thread."""
        with self._lock:
            if self._closed:
                raise PipelineError(f"{label}: the pipeline is shut down; create a new one")
            self._count += 1
            future = self._executor.submit(_run_in_turn, self._turn, call)
        return AsyncTrainingFuture(future, f"{label} (call {self._count} of {self._name})", self)

    def run(self, label: str, call: Callable[[], Any]) -> Any:
        """Queue `call` and wait for it."""
        if self.is_current():
            raise PipelineError(
                f"{label}: called inside another call of the same model, it would wait for itself"
            )
        return self.submit(label, call).result()

    def is_current(self) -> bool:
        """True inside a call of this lane, or of another one with the same turn."""
        return self._turn.is_mine()

    def shutdown(self, cancel_pending: bool = False) -> None:
        """Finish what is queued (or cancel it), then end the thread. May be called twice."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=not self.is_current(), cancel_futures=cancel_pending)


def _run_in_turn(turn: Turn, call: Callable[[], Any]) -> Any:
    with turn:
        return call()
