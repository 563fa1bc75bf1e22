"""Untrusted Python code and calls to it in, what the calls returned out; run in a limited subprocess.

This keeps accidents away (endless loops, memory, huge files, many processes, the user's environment
variables) and the cheats that a policy finds: the expected values and every comparison stay here, and the
code cannot open the files of its user, such as the problems'. It is NOT a sandbox against an attacker: what
keeps the code from files and the network is a hook inside its own interpreter. A hardened sandbox
(namespaces, a file system of its own) comes later; until then train on code only where everything that this
user may touch is expendable, for example in a container.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rl_cluster.checks import check_number
from rl_cluster.environments.ready.code_problems import CodeTest
from rl_cluster.environments.ready.code_values import CallResult as CallResult
from rl_cluster.environments.ready.code_values import read_results
from rl_cluster.environments.ready.code_values import same_value as same_value

MAX_RESULT_BYTES = 1_000_000


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


def run_calls(code: str, calls: Sequence[str], limits: CodeLimits) -> list[CallResult]:
    """One result per call, in order. Only plain values travel: other objects are not ok.

    The process starts in an empty temporary folder, deleted afterwards, with no environment but PATH, HOME,
    TMPDIR and LANG. It and its process group are killed when the time is up, and when it has ended. With
    limits.processes above 0 it may start programs, which nothing keeps from this user's files.
    """
    token = secrets.token_hex(16)
    order = {"code": code, "calls": list(calls), "token": token, "processes": limits.processes}
    with tempfile.TemporaryDirectory(prefix="rl_cluster_code_", ignore_cleanup_errors=True) as folder:
        written, ending = _run_child(json.dumps(order).encode(), Path(folder), limits)
    return read_results(written, token, len(calls), ending)


def passed_tests(code: str, tests: Sequence[CodeTest], limits: CodeLimits) -> list[bool]:
    """Which tests return the expected value (floats to nine digits); the code never sees these values."""
    results = run_calls(code, [test.call for test in tests], limits)
    return [r.ok and same_value(r.value, t.expected) for r, t in zip(results, tests, strict=True)]


def _for_child(limits: CodeLimits) -> dict[str, int]:
    return {
        "cpu_seconds": math.ceil(limits.seconds),
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "open_files": limits.open_files,
        "processes": limits.processes,
    }


@lru_cache(maxsize=2)
def _program(name: str) -> str:
    """As text, so that the code cannot tell where it lies and what lies beside it."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _run_child(order: bytes, home: Path, limits: CodeLimits) -> tuple[bytes, str]:
    """Run the child to its end or to the deadline; what it wrote, and how it ended, "" if by itself."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"}
    command = [sys.executable, "-I", "-S", "-B", "-c", _program("code_limits.py")]
    command += [json.dumps(_for_child(limits)), _program("code_child.py")]
    deadline = time.monotonic() + limits.seconds
    with tempfile.TemporaryFile() as orders:
        orders.write(order)
        orders.seek(0)
        process = subprocess.Popen(
            command,
            stdin=orders,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=os.path.realpath(home),
            env=clean,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        written, ending = _read_until(process.stdout.fileno(), deadline)
        if not ending:
            process.wait(max(deadline - time.monotonic(), 0.0) + 1.0)
    except subprocess.TimeoutExpired:
        ending = "timeout"
    finally:
        # The group too: what the code started must not outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    if ending or process.returncode == 0:
        return written, ending
    return written, f"died with {_signal_name(process.returncode)}"


def _read_until(descriptor: int, deadline: float) -> tuple[bytes, str]:
    """All that is written until the end, the deadline ("timeout") or MAX_RESULT_BYTES ("too much output")."""
    written = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            part = os.read(descriptor, 65536)
            if not part:
                return bytes(written), ""
            written += part
            if len(written) > MAX_RESULT_BYTES:
                return b"", "too much output"
    return bytes(written), "timeout"


def _signal_name(returncode: int) -> str:
    known = -returncode in {s.value for s in signal.Signals}
    return signal.Signals(-returncode).name if known else f"exit status {returncode}"
