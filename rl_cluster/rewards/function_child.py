"""The program of a process that holds one user's function: orders in, outcomes out, over a connection.

A function that ends its process, hangs or breaks its interpreter ends this one, and its run is told by name.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rl_cluster.config.reward import FunctionScorer
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.calling import Arguments, Outcome, score_arguments
from rl_cluster.rewards.loading import make_function
from rl_cluster.rewards.safe_text import error_text
from rl_cluster.rewards.trying import try_function


@dataclass(frozen=True)
class Start:
    """path: Python's own, of the parent. trial: a real prompt and its metadata, to try the function with."""

    name: str
    config: FunctionScorer
    folder: str
    path: tuple[str, ...]
    trial: tuple[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Started:
    """refused: why the run must not start, or "". warned: what its user should know."""

    is_async: bool = False
    refused: str = ""
    warned: str = ""


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    start: Start = connection.recv()
    sys.path[:] = start.path
    try:
        function = make_function(start.config, Path(start.folder))
        warned = "" if start.trial is None else try_function(start.name, start.config, function, *start.trial)
    except BadInputError as error:
        connection.send(Started(refused=str(error)))
        return
    is_async = inspect.iscoroutinefunction(function)
    connection.send(Started(is_async, warned=warned))
    serve = _serve_together if is_async else _serve_in_turn
    serve(start, function, connection)


def _serve_in_turn(start: Start, function: Any, connection: Connection) -> None:
    """In the main thread, where functions may use signals."""
    while (order := _receive(connection)) is not None:
        number, arguments = order
        _send(connection, number, asyncio.run(score_arguments(start.name, function, arguments)))


def _serve_together(start: Start, function: Any, connection: Connection) -> None:
    asyncio.run(_serve_tasks(start, function, connection))


async def _serve_tasks(start: Start, function: Any, connection: Connection) -> None:
    loop, orders = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def listen() -> None:
        while (order := _receive(connection)) is not None:
            loop.call_soon_threadsafe(orders.put_nowait, order)
        loop.call_soon_threadsafe(orders.put_nowait, None)

    threading.Thread(target=listen, name="orders", daemon=True).start()
    tasks: set[asyncio.Task[None]] = set()
    while (order := await orders.get()) is not None:
        task = asyncio.create_task(_answer(start, function, connection, *order))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _answer(
    start: Start, function: Any, connection: Connection, number: int, arguments: Arguments
) -> None:
    seconds = start.config.timeout_seconds
    try:
        outcomes = await asyncio.wait_for(score_arguments(start.name, function, arguments), seconds)
    except TimeoutError:
        return  # the parent has counted, too, and knows
    _send(connection, number, outcomes)


def _receive(connection: Connection) -> Any:
    """None when the run is over."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _send(connection: Connection, number: int, outcomes: list[Outcome]) -> None:
    try:
        connection.send((number, outcomes))
    except OSError as error:
        warnings.warn(f"nobody waits for a score any more: {error_text(error)}", stacklevel=2)
