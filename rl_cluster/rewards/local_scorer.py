"""The Scorer protocol without Ray: a group in, its score from a function in this process out.

A synchronous function runs in a thread, one call at a time. A thread cannot be ended: after a timeout it is
left behind (as a daemon, it does not keep the process alive) and may go on using the CPU. The Ray scorer ends
its process.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from rl_cluster.protocols import Ref
from rl_cluster.rewards.calling import (
    Outcome,
    call,
    failure_of,
    gather_arguments,
    is_the_functions_own,
    read_answer,
    resolve,
)
from rl_cluster.rewards.loading import ScoreFunction
from rl_cluster.rewards.safe_text import error_text
from rl_cluster.trajectory import ScoreFailure

IDLE_SECONDS = 1.0
"""So long a thread waits for its next call before it ends: starting one costs more than a short function."""


class LocalScorer:
    """Implements protocols.Scorer; a group's Ref is the TrajectoryGroup itself."""

    def __init__(
        self, name: str, function: ScoreFunction, weight: float = 1.0, timeout_seconds: float = 60.0
    ) -> None:
        self.name = name
        self.weight = weight
        self._function = function
        self._timeout_seconds = timeout_seconds
        many = inspect.iscoroutinefunction(function)
        self._turn: AbstractAsyncContextManager[Any] = nullcontext() if many else asyncio.Lock()

    async def score(self, group: Ref) -> Outcome:
        """timeout_seconds begin when the function is called, not while other groups have their turn."""
        async with self._turn:
            return await self._score(group)

    async def _score(self, group: Ref) -> Outcome:
        arguments = gather_arguments([group])
        start = time.perf_counter()
        deadline = asyncio.timeout(self._timeout_seconds)
        try:
            async with deadline:
                answer = await self._answer(arguments)
        except BaseException as error:
            if deadline.expired():
                return ScoreFailure(self.name, "timeout", f"no answer within {self._timeout_seconds:g} s")
            if not is_the_functions_own(error):
                raise
            return failure_of(self.name, error)
        seconds = time.perf_counter() - start
        return read_answer(self.name, answer, arguments.sizes, seconds, none_is_missing=True)[0]

    async def _answer(self, arguments: Any) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await call(self._function, arguments)
        return await resolve(await in_thread(lambda: call(self._function, arguments)))


async def in_thread(function: Callable[[], Any]) -> Any:
    """As asyncio.to_thread, but with a daemon thread, which a hanging function may keep to itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # nobody waits any longer
            _drop(result)
        elif error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = (function(), None)
        except BaseException as error:  # noqa: BLE001 — whatever it is, the caller must hear of it
            # A future refuses StopIteration, and SystemExit would end the event loop.
            kept = isinstance(error, Exception) and not isinstance(error, StopIteration)
            outcome = (None, error if kept else RuntimeError(error_text(error)))
        if loop.is_closed():
            _drop(outcome[0])
        else:
            loop.call_soon_threadsafe(settle, *outcome)

    _do(work)
    return await future


def _drop(result: Any) -> None:
    """A coroutine that nobody will await would complain."""
    if inspect.iscoroutine(result):
        result.close()


Work = Callable[[], None]
_idle: list[queue.SimpleQueue[Work]] = []
_idle_lock = threading.Lock()


def _do(work: Work) -> None:
    """In a thread that has nothing to do, else in a new one."""
    with _idle_lock:
        calls = _idle.pop() if _idle else None
        if calls is not None:
            calls.put(work)
            return
    calls = queue.SimpleQueue()
    calls.put(work)
    threading.Thread(target=_serve, args=(calls,), name="scorer", daemon=True).start()


def _serve(calls: queue.SimpleQueue[Work]) -> None:
    while True:
        try:
            work = calls.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            with _idle_lock:
                if calls in _idle:  # else work is just being handed over
                    _idle.remove(calls)
                    return
            continue
        work()
        del work  # it holds the user's objects
        with _idle_lock:
            _idle.append(calls)
