"""Untrusted Python code and calls to it in, what the calls returned out; run in a limited subprocess.

This keeps accidents away (endless loops, memory, huge files, many processes, the user's environment
variables) and takes the expected values out of the code's reach. It is NOT a sandbox against an attacker: the
code runs as the same user, can read that user's files, open sockets and signal that user's processes. A
hardened sandbox (namespaces, no network, a file system of its own) comes later; until then train on code only
where everything that this user may touch is expendable, for example in a container.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.environments.code_problems import CodeTest

MAX_RESULT_BYTES = 1_000_000
CHILD = Path(__file__).with_name("code_child.py")


@dataclass(frozen=True)
class CodeLimits:
    """seconds: wall clock for the code and all calls together; the same limit, rounded up, for CPU time.

    memory_bytes: address space. file_bytes: the largest file it may write. processes: how many more processes
    and threads its user may have while it runs (0: it can start none; the system does not hold root to it).
    """

    seconds: float = 5.0
    memory_bytes: int = 512 * 1024**2
    file_bytes: int = 1024**2
    open_files: int = 32
    processes: int = 0

    def __post_init__(self) -> None:
        check_number("CodeLimits.seconds", self.seconds, above=0.0)
        check_number("CodeLimits.memory_bytes", self.memory_bytes, at_least=64 * 1024**2)
        check_number("CodeLimits.file_bytes", self.file_bytes, at_least=1024)
        check_number("CodeLimits.open_files", self.open_files, at_least=8)
        check_number("CodeLimits.processes", self.processes, at_least=0)


@dataclass(frozen=True)
class CallResult:
    """value: what the call returned, None unless ok. error: why not ok: an exception, "timeout", "died", …"""

    ok: bool
    value: Any = None
    error: str = ""


def run_calls(code: str, calls: Sequence[str], limits: CodeLimits) -> list[CallResult]:
    """One result per call, in order. Values travel as Python literals: other objects are not ok.

    The process starts in an empty temporary folder, deleted afterwards, with no environment but PATH, HOME,
    TMPDIR and LANG. It and its process group are killed when the time is up, and when it has ended.
    """
    with tempfile.TemporaryDirectory(prefix="rl_cluster_code_", ignore_cleanup_errors=True) as folder:
        results = Path(folder) / "results.jsonl"
        home = Path(folder) / "home"
        home.mkdir()
        order = {"code": code, "calls": list(calls), "results": str(results), "limits": _for_child(limits)}
        ending = _run_child(json.dumps(order).encode(), home, limits.seconds)
        return _read_results(results, len(calls), ending)


def passed_tests(code: str, tests: Sequence[CodeTest], limits: CodeLimits) -> list[bool]:
    """Which tests return the expected value (floats to nine digits); the code never sees these values."""
    results = run_calls(code, [test.call for test in tests], limits)
    return [r.ok and same_value(r.value, t.expected) for r, t in zip(results, tests, strict=True)]


def same_value(value: Any, expected: Any) -> bool:
    """Equal and of the same type, in all depths: True is not 1, and a tuple is no list."""
    if type(value) is not type(expected):
        return False
    if isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same_value(value[k], v) for k, v in expected.items())
    return bool(value == expected)


def _for_child(limits: CodeLimits) -> dict[str, int]:
    return {
        "cpu_seconds": math.ceil(limits.seconds),
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "open_files": limits.open_files,
        "processes": limits.processes,
    }


def _run_child(order: bytes, home: Path, seconds: float) -> str:
    """Run code_child.py to its end or to the deadline; how it ended, "" if by itself."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=home,
        env=clean,
        start_new_session=True,
    )
    try:
        process.communicate(order, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        # The group too: what the code started must not outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "" if process.returncode == 0 else f"died with {_signal_name(process.returncode)}"


def _signal_name(returncode: int) -> str:
    known = -returncode in {s.value for s in signal.Signals}
    return signal.Signals(-returncode).name if known else f"exit status {returncode}"


def _read_results(path: Path, num_calls: int, ending: str) -> list[CallResult]:
    missing = CallResult(False, error=ending or "the code ended the process")
    found: dict[int, CallResult] = {}
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_RESULT_BYTES)
        for line in text.splitlines():
            found |= _read_line(line)
    if -1 in found and not found[-1].ok:
        return [found[-1]] * num_calls
    return [found.get(index, missing) for index in range(num_calls)]


def _read_line(line: str) -> dict[int, CallResult]:
    """{index: result} of one line of the child; {} for a line that is not one (cut off, or forged)."""
    try:
        index, value, error = json.loads(line)
        if value is None:
            return {int(index): CallResult(False, error=str(error))}
        return {int(index): CallResult(True, ast.literal_eval(value))}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _not_a_literal(line)


def _not_a_literal(line: str) -> dict[int, CallResult]:
    try:
        index, value, _ = json.loads(line)
        return {int(index): CallResult(False, error=f"returned {value!s:.80}, which is no plain value")}
    except (ValueError, TypeError):
        return {}
