"""Who wrote a lock or a half-made folder: a process as a value, and whether it still lives."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

START_TOLERANCE = 3.0
"""Seconds: a start time is worked out from the boot time, which a clock's correction moves."""


@dataclass(frozen=True)
class Process:
    """realm: the boot and the process namespace that `pid` belongs to. started: seconds since 1970."""

    host: str
    realm: str
    pid: int
    started: float

    def is_alive(self) -> bool | None:
        """None: it belongs to another machine or container, so nothing is known."""
        if self.realm != this_realm():
            return None
        return alive(self.pid, self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    """Not cached, because a fork is another process."""
    pid = os.getpid()
    return Process(socket.gethostname(), this_realm(), pid, psutil.Process(pid).create_time())


def alive(pid: int, started: float) -> bool:
    """A process of this realm; a zombie has ended."""
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        return bool(abs(process.create_time() - started) <= START_TOLERANCE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


@lru_cache(maxsize=1)
def this_realm() -> str:
    """Eight letters. Containers may share a host's name, and a host its number of processes with its past."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:  # not Linux: the host's name has to do
        pass
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=4).hexdigest()
