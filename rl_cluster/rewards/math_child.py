"""The program of the process in which mathematics is read: lines of JSON in (batches), lines of JSON out.

It imports math-verify once and forks for each batch. The fork limits itself: so much processor time per
item, so much more memory. The system ends one that goes beyond; the next item gets a fresh fork. What it has
found so far is in memory that both share. Imports nothing of this project, so that a fork is small.
"""

import json
import logging
import mmap
import os
import resource
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PENDING, REFERENCE, RESPONSE, WRONG, RIGHT = range(5)
UNREADABLE, REFERENCE_ENDED, RESPONSE_ENDED = range(5, 8)
"""What is known of an item. REFERENCE, RESPONSE: being read now. …_ENDED: reading it ended the process, by
its time, its memory or a crash."""

PATIENT_ENDINGS = 4
"""After so many endings in a batch, items get a fraction of the time: a batch of only traps must end."""
IMPATIENCE = 8
WALL_FACTOR = 10
"""An item may take so many times its processor seconds by the clock, on a machine that is busy elsewhere."""


def main() -> None:
    reading = _import_reading()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    for line in requests:
        request = json.loads(line)
        answers.write(json.dumps(_run(reading, request)).encode() + b"\n")
        answers.flush()


def _import_reading() -> ModuleType:
    """The module beside this file, by its path: nothing else of the folder may be imported."""
    import importlib.util

    path = Path(__file__).with_name("math_reading.py")
    spec = importlib.util.spec_from_file_location("math_reading", path)
    assert spec is not None, "a .py file always has a loader"
    assert spec.loader is not None, "a .py file always has a loader"
    reading = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reading)
    logging.disable(logging.CRITICAL)
    # Parsers build their tables at the first use; every fork inherits them.
    for text in ("$\\frac{1}{2}$", "1/2", "(2, 3)", "x^2+1"):
        gold, _ = reading.read_reference(text)
        reading.is_right(gold, f"\\boxed{{{text}}}")
    return reading


def _run(reading: ModuleType, request: dict[str, Any]) -> list[list[Any]]:
    """[[state, why], …]; why: for a reference that is of no use."""
    items = request["items"]
    states = mmap.mmap(-1, max(len(items), 1))
    reasons: dict[int, str] = {}
    start, endings = 0, 0
    while start < len(items):
        seconds = request["seconds"] / (IMPATIENCE if endings >= PATIENT_ENDINGS else 1)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            _work(reading, items, start, states, tell, seconds, request["memory_bytes"])
        os.close(tell)
        with os.fdopen(told, "rb") as pipe:
            for line in pipe.read().splitlines():
                index, why = json.loads(line)
                reasons[index] = why
        os.waitpid(child, 0)
        start = next((i for i in range(start, len(items)) if states[i] < WRONG), len(items))
        if start < len(items):
            states[start] = RESPONSE_ENDED if states[start] == RESPONSE else REFERENCE_ENDED
            start, endings = start + 1, endings + 1
    return [[states[i], reasons.get(i, "")] for i in range(len(items))]


def _work(
    reading: ModuleType,
    items: list[tuple[str, str | None]],
    start: int,
    states: mmap.mmap,
    tell: int,
    seconds: float,
    memory_bytes: int,
) -> None:
    """In the fork; never returns."""
    try:
        _limit(memory_bytes)
        known: dict[str, tuple[list[Any], str]] = {}
        for index in range(start, len(items)):
            _timers(seconds)
            states[index] = REFERENCE
            answer, response = items[index]
            if answer not in known:
                known = {answer: _read(reading, answer)}
            gold, why = known[answer]
            if why:
                os.write(tell, json.dumps([index, why]).encode() + b"\n")
                states[index] = UNREADABLE
                continue
            states[index] = RESPONSE
            states[index] = RIGHT if response is None or _right(reading, gold, response) else WRONG
        _timers(0)
    finally:
        os._exit(0)


def _read(reading: ModuleType, answer: str) -> tuple[list[Any], str]:
    try:
        read: tuple[list[Any], str] = reading.read_reference(answer)
    except Exception as error:  # noqa: BLE001 — the parsers raise anything
        return [], f"cannot be read as mathematics ({type(error).__name__})"
    return read


def _right(reading: ModuleType, gold: list[Any], response: str) -> bool:
    try:
        return bool(reading.is_right(gold, response))
    except Exception:  # noqa: BLE001 — what cannot be evaluated is not the right answer
        return False


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # ends the process, whoever holds the GIL
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return  # only Linux counts it, and only there the limit below means anything
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _timers(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL_FACTOR)


if __name__ == "__main__":
    sys.setrecursionlimit(2000)
    main()
