"""One process at a time writes a run folder: a lock file in it, kept alive by a heartbeat.

No flock, which NFS may lack or forget: the file is created with O_EXCL, and its modification time is the
heartbeat. Both times that are compared are the file server's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.processes import Process, this_process

LOCK = "run.lock"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
"""Without a heartbeat, after which a holder of which nothing else is known counts as dead. NFS clients may
see a time that is a minute old."""
WRITING_SECONDS = 2.0
"""For a lock file that is there and empty: its holder is about to write it."""
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Holder:
    """token: tells two locks of one process apart."""

    process: Process
    token: str


class RunLock:
    """Held from `acquire` to `release`."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self.path = path
        self._holder = holder
        self._lost = False
        self._end = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._heart.start()

    @classmethod
    def acquire(cls, folder: Path) -> RunLock:
        """Of an existing folder. Raises BadInputError that names who holds it, OSError where the folder is
        missing or read-only. The lock of a dead process is taken over."""
        path, holder = folder / LOCK, Holder(this_process(), secrets.token_hex(8))
        while not _create(path, holder):
            if not _remove_dead(path):
                raise BadInputError(_in_use(folder, path))
        return cls(path, holder)

    def check(self) -> None:
        """Raise CheckpointError where another process has taken this lock over."""
        if self._lost:
            raise CheckpointError(
                f"{self.path}: another process has taken over this run, because this one gave no sign of "
                f"life for {STALE_SECONDS:g} s. It ends here; the other goes on."
            )

    def release(self) -> None:
        """The second call does nothing, and neither does one in a forked child."""
        if self._end.is_set() or self._holder.process.pid != os.getpid():
            return
        self._end.set()
        self._heart.join(timeout=HEARTBEAT_SECONDS)
        with contextlib.suppress(FileNotFoundError):
            if _read(self.path) == self._holder:
                self.path.unlink()

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_SECONDS):
            try:
                if _read(self.path) != self._holder:
                    self._lost = True
                    return
                os.utime(self.path)
            except FileNotFoundError:
                self._lost = True
                return
            except OSError:  # a file server that is away for a while: the next beat tells
                continue


def holder_of(folder: Path) -> str | None:
    """Who writes this folder now, in words; None: nobody that lives."""
    path = folder / LOCK
    return None if not path.exists() or _is_dead(path) else _words(path)


def _create(path: Path, holder: Holder) -> bool:
    """False where the file is there already."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(handle, json.dumps({**asdict(holder.process), "token": holder.token}).encode())
        os.fsync(handle)
    finally:
        os.close(handle)
    return True


def _read(path: Path) -> Holder | None:
    """None: nobody that can be read. Raises FileNotFoundError, OSError."""
    try:
        values = json.loads(path.read_bytes())
        token = str(values.pop("token"))
        return Holder(Process(**values), token)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _remove_dead(path: Path) -> bool:
    """True where the lock's holder is dead (or has just released it): it is gone then, and free for anybody.

    Of several that find it dead, the one that creates the guard beside it removes it; the others do not
    touch it, so that none removes the lock that a faster one has made in the meantime.
    """
    if not _is_dead(path):
        return not path.exists()
    guard, me = path.with_name(f"{LOCK}.takeover"), Holder(this_process(), secrets.token_hex(8))
    if not _create(guard, me):
        if _is_dead(guard):
            _remove_exactly(guard)
        time.sleep(POLL_SECONDS)
        return True
    try:
        if _is_dead(path):
            path.unlink(missing_ok=True)
    finally:
        guard.unlink(missing_ok=True)
    return True


def _remove_exactly(guard: Path) -> None:
    """A guard whose holder died within its milliseconds. Renamed first: of several, one gets it."""
    aside = guard.with_name(f"{guard.name}.{secrets.token_hex(4)}")
    try:
        os.rename(guard, aside)
        aside.unlink()
    except FileNotFoundError:
        return


def _is_dead(path: Path) -> bool:
    """Is the holder of this lock surely gone? False where the lock itself is gone."""
    try:
        holder = _written(path)
        alive = None if holder is None else holder.process.is_alive()
        return _silence(path) > STALE_SECONDS if alive is None else not alive
    except FileNotFoundError:
        return False


def _written(path: Path) -> Holder | None:
    """_read, waiting for a holder that has created its file and not yet written it."""
    until = time.monotonic() + WRITING_SECONDS
    while (holder := _read(path)) is None and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return holder


def _silence(path: Path) -> float:
    """Seconds since the last heartbeat, by the file server's clock; where that is read-only, by ours."""
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    except PermissionError:
        now = time.time()
    return now - path.stat().st_mtime


def is_lock_file(name: str) -> bool:
    """Lock, guard or probe."""
    return name.removeprefix(".").startswith(LOCK)


def _in_use(folder: Path, path: Path) -> str:
    return (
        f"run.dir = {folder}: is in use by {_words(path)}. Wait for it, end it, or choose another folder. A "
        f"lock left by a machine that died is taken over after {STALE_SECONDS:g} s without a sign of life."
    )


def _words(path: Path) -> str:
    try:
        holder = _read(path)
    except FileNotFoundError:
        return "another process, which has just ended"
    if holder is None:
        return f"a process that {path} does not name"
    if holder.process.pid == os.getpid() and holder.process.is_alive():
        return f"this very process ({holder.process}); close() the trainer that has it open"
    return str(holder.process)
