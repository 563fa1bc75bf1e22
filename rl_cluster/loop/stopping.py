"""SIGTERM and Ctrl-C in, a request that loops heed between two updates out; a second one ends them."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any


class StopAskedError(Exception):
    """Raised in the loop when somebody has asked it to stop; the state between steps is whole then."""


class StopRequest:
    """`ask` from any thread or a signal's handler; one loop waits for it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._asked = threading.Event()
        self._wake: Any = None

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self, number: int | None = None) -> None:
        """number: of the signal, where it was one."""
        self.signal = number
        self._asked.set()
        if self._wake is not None:
            self._wake()

    async def wait(self) -> None:
        """Until somebody asks."""
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.is_closed() or loop.call_soon_threadsafe(event.set)
        try:
            if not self.asked:
                await event.wait()
        finally:
            self._wake = None


@contextmanager
def stop_signals(stop: StopRequest) -> Iterator[None]:
    """Inside, the first SIGTERM or Ctrl-C asks, a second one raises as it always does. When the block ends
    because of the first, KeyboardInterrupt or SystemExit(128 + signal) comes out. In other threads than the
    main one nothing is changed, because Python allows handlers only there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _: Any) -> None:
        if stop.asked:
            _raise(number)
        print("stopping after the update under way; once more to leave at once", file=sys.stderr, flush=True)
        stop.ask(number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    except (StopAskedError, asyncio.CancelledError):
        if stop.signal is None:
            raise
        _raise(stop.signal)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


@asynccontextmanager
async def stoppable(
    producing: asyncio.Task[None] | None, stop: StopRequest, seconds: float, main: asyncio.Task[Any]
) -> AsyncIterator[asyncio.Task[None]]:
    """A task that fails as `producing` does, or with StopAskedError once somebody asks. From then on `main`
    has so many seconds, after which it is cancelled."""

    async def watch() -> None:
        asking = asyncio.ensure_future(stop.wait())
        try:
            waited = {asking} if producing is None else {asking, producing}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if producing is not None and producing.done():
                await producing
        finally:
            asking.cancel()
        late.append(asyncio.get_running_loop().call_later(seconds, main.cancel))
        raise StopAskedError("asked to stop")

    late: list[asyncio.TimerHandle] = []
    failing = asyncio.create_task(watch(), name="stopping")
    try:
        yield failing
    finally:
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)
        for timer in late:
            timer.cancel()
