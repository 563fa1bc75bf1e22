"""The Scorer protocol without Ray: a group in, its score from a function in this process out.

A synchronous function runs in a thread. A thread cannot be ended: after a timeout it is left behind (as a
daemon, it does not keep the process alive) and may go on using the CPU. The Ray scorer ends its process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from typing import Any

from rl_cluster.protocols import Ref
from rl_cluster.rewards.calling import Outcome, call, failure_of, gather_arguments, read_answer, resolve
from rl_cluster.rewards.loading import ScoreFunction
from rl_cluster.trajectory import ScoreFailure


class LocalScorer:
    """Implements protocols.Scorer; a group's Ref is the TrajectoryGroup itself."""

    def __init__(
        self, name: str, function: ScoreFunction, weight: float = 1.0, timeout_seconds: float = 60.0
    ) -> None:
        self.name = name
        self.weight = weight
        self._function = function
        self._timeout_seconds = timeout_seconds

    async def score(self, group: Ref) -> Outcome:
        arguments = gather_arguments([group])
        start = time.perf_counter()
        deadline = asyncio.timeout(self._timeout_seconds)
        try:
            async with deadline:
                answer = await self._answer(arguments)
        except Exception as error:  # noqa: BLE001 — the user's code may raise anything
            if deadline.expired():
                return ScoreFailure(self.name, "timeout", f"no answer within {self._timeout_seconds:g} s")
            return failure_of(self.name, error)
        return read_answer(self.name, answer, arguments.sizes, time.perf_counter() - start)[0]

    async def _answer(self, arguments: Any) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await call(self._function, arguments)
        return await resolve(await _in_thread(lambda: call(self._function, arguments)))


async def _in_thread(function: Any) -> Any:
    """As asyncio.to_thread, but with a daemon thread of its own, which a hanging function may keep."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
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
            outcome = (None, error if kept else RuntimeError(f"{type(error).__name__}: {error}"))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="scorer", daemon=True).start()
    return await future
