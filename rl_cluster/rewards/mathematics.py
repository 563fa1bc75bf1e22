"""Right answers and responses in; which responses are right, and which answers can be read at all, out.

Whatever a policy writes is read in a child process with limits (math_child): a response that takes too long,
too much memory or crashes the parser is a wrong answer. One child serves a process, from any of its threads.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_cluster.rewards.math_child import REFERENCE_ENDED, RIGHT, UNREADABLE

CHILD = Path(__file__).with_name("math_child.py")
SECONDS_PER_ITEM = 2.0
"""Of processor time, for one answer and one response; an ordinary pair takes some milliseconds."""
MEMORY_BYTES = 1024**3
"""More than the child has at its start."""
ITEMS_PER_REQUEST = 1000
"""Of references: what a parser remembers of them is forgotten in between."""
LONGEST_RESPONSE = 100_000
"""Characters that are read, from the end, where answers are."""

_PLAIN_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d{1,12})?")


@dataclass(frozen=True)
class Unreadable:
    """answer: of the data. why: completes "the right answer … "."""

    answer: str
    why: str


class MathChild:
    """The child process; started at the first call, again after it died, and in a fork of this process."""

    def __init__(self, seconds: float = SECONDS_PER_ITEM, memory_bytes: int = MEMORY_BYTES) -> None:
        """seconds: processor time per item."""
        self._limits = {"seconds": seconds, "memory_bytes": memory_bytes}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def check(self, pairs: Sequence[tuple[str, str]]) -> list[bool | Unreadable]:
        """(right answer, response) -> whether it is right. A response that cannot be evaluated is wrong."""
        items = [(answer, response[-LONGEST_RESPONSE:]) for answer, response in pairs]
        return [_verdict(answer, *state) for (answer, _), state in zip(items, self._ask(items), strict=True)]

    def unreadable(self, answers: Sequence[str]) -> list[Unreadable]:
        """The right answers, each once, that no response could be compared with."""
        distinct = list(dict.fromkeys(a for a in answers if not _PLAIN_NUMBER.fullmatch(a)))
        verdicts: list[bool | Unreadable] = []
        for start in range(0, len(distinct), ITEMS_PER_REQUEST):
            part = distinct[start : start + ITEMS_PER_REQUEST]
            states = self._ask([(answer, None) for answer in part])
            verdicts += [_verdict(answer, *state) for answer, state in zip(part, states, strict=True)]
        return [verdict for verdict in verdicts if isinstance(verdict, Unreadable)]

    def close(self) -> None:
        """End the child; the next call starts another."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()

    def _ask(self, items: Sequence[tuple[str, str | None]]) -> list[tuple[int, str]]:
        if not items:
            return []
        request = json.dumps({"items": items, **self._limits}).encode() + b"\n"
        with self._lock:
            for _ in range(2):
                answer = self._exchange(request)
                if answer:
                    return [(state, why) for state, why in json.loads(answer)]
                self.close()
        raise RuntimeError(f"mathematics: the process that compares answers ({CHILD.name}) keeps ending.")

    def _exchange(self, request: bytes) -> bytes:
        """The child's line; b"" where it ended instead."""
        if self._process is None or self._owner != os.getpid():
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except OSError:
            return b""
        line = self._process.stdout.readline()
        return line if line.endswith(b"\n") else b""

    def _start(self) -> None:
        # -P: the folder of the program, where other modules lie, is not searched. A session of its own:
        # Ctrl-C is for the run, whose end the child notices by its standard input.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._owner = os.getpid()


def _verdict(answer: str, state: int, why: str) -> bool | Unreadable:
    if state == UNREADABLE:
        return Unreadable(answer, why)
    if state == REFERENCE_ENDED:
        return Unreadable(answer, "takes too long, or too much memory, to be read")
    return state == RIGHT


OF_THIS_PROCESS = MathChild()
"""The one that every scorer and environment of a process shares."""
atexit.register(OF_THIS_PROCESS.close)
