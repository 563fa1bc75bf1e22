"""A user's function in a process of its own, for runs without Ray: groups in, scores or failures out."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rl_cluster.config.reward import FunctionScorer
from rl_cluster.errors import BadInputError
from rl_cluster.protocols import Ref
from rl_cluster.rewards.calling import Arguments, Outcome, gather_arguments
from rl_cluster.rewards.function_child import Start, Started
from rl_cluster.rewards.local_scorer import in_thread
from rl_cluster.trajectory import Prompt, ScoreFailure

START_SECONDS = 600.0
GRACE_SECONDS = 10.0
"""An asynchronous function's process gives up a call itself; one that does not even do that is ended."""


class FunctionProcess:
    """A running child. Calls may come from many threads; `ended` says how it ended, once it has."""

    def __init__(self, name: str, config: FunctionScorer, trial: Prompt | None = None) -> None:
        """Returns when the function is imported (and tried, with a trial); BadInputError if it is refused."""
        ours, theirs = socket.socketpair()
        # Not -m: what the module defines would be __main__'s, and no pickle could name it.
        program = f"from rl_cluster.rewards.function_child import main; main({theirs.fileno()})"
        command = [sys.executable, "-c", program]
        search = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": search},
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._finalizer = weakref.finalize(self, _end, self._process)
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        shown = None if trial is None else (trial.text, dict(trial.metadata))
        self.started = self._start(Start(name, config, str(Path.cwd()), tuple(sys.path), shown))
        threading.Thread(target=self._listen, name=f"scorer {name}", daemon=True).start()

    def _start(self, start: Start) -> Started:
        where = f"rewards.scorers ({start.name}): {start.config.function}"
        try:
            self._connection.send(start)
            if not self._connection.poll(START_SECONDS):
                self.close()
                raise BadInputError(f"{where} was not imported within {START_SECONDS:g} s.")
            started: Started = self._connection.recv()
        except (EOFError, OSError) as error:
            raise BadInputError(
                f"{where}: its process ended ({self.ended()}) while it was imported and tried. Take out what "
                "ends the process (sys.exit, os._exit, a crash)."
            ) from error
        if started.refused:
            self.close()
            raise BadInputError(started.refused)
        return started

    def ask(self, arguments: Arguments, seconds: float) -> list[Outcome] | None:
        """None if the process ended first. TimeoutError."""
        number, answer = next(self._numbers), queue.SimpleQueue[list[Outcome] | None]()
        self._waiting[number] = answer
        try:
            with self._sending:
                self._connection.send((number, arguments))
            return answer.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        except OSError:
            return None
        finally:
            self._waiting.pop(number, None)

    def _listen(self) -> None:
        while True:
            try:
                number, outcomes = self._connection.recv()
            except (EOFError, OSError):
                break
            if number in self._waiting:
                self._waiting[number].put(outcomes)
        for answer in tuple(self._waiting.values()):
            answer.put(None)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def ended(self) -> str:
        """How it ended; waits for it."""
        code = self._process.wait(GRACE_SECONDS)
        return f"exit status {code}" if code >= 0 else signal.Signals(-code).name

    def close(self) -> None:
        self._finalizer()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class ProcessScorer:
    """Implements protocols.Scorer; a group's Ref is the TrajectoryGroup itself.

    A synchronous function has one call at a time, an asynchronous one many. A process that ended, or missed
    its deadline, is replaced with the next call.
    """

    def __init__(self, name: str, config: FunctionScorer) -> None:
        self.name, self.weight = name, config.weight
        self._config = config
        self._process = FunctionProcess(name, config)
        self._replacing = threading.Lock()
        many = self._process.started.is_async
        self._patience = GRACE_SECONDS if many else 0.0
        self._turn: AbstractAsyncContextManager[Any] = nullcontext() if many else asyncio.Lock()

    async def score(self, group: Ref) -> Outcome:
        async with self._turn:
            result: Outcome = (await in_thread(lambda: self._score(gather_arguments([group]))))[0]
            return result

    def _score(self, arguments: Arguments) -> Sequence[Outcome]:
        seconds = self._config.timeout_seconds
        try:
            process = self._running()
        except BadInputError as error:
            return [ScoreFailure(self.name, "died", f"its process could not be started again: {error}")]
        try:
            outcomes = process.ask(arguments, seconds + self._patience)
        except TimeoutError:
            if not self._patience:
                process.close()
            return [ScoreFailure(self.name, "timeout", f"no answer within {seconds:g} s")]
        if outcomes is None:
            return [ScoreFailure(self.name, "died", f"the function ended its process ({process.ended()})")]
        return outcomes

    def _running(self) -> FunctionProcess:
        with self._replacing:
            if not self._process.is_running():
                self._process = FunctionProcess(self.name, self._config)
            return self._process
