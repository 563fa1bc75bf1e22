"""Files and folders that are there complete or not at all, also where they replace an older one."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_cluster.errors import CheckpointError
from rl_cluster.files.own_folders import check_replaceable, keep_foreign_files, write_marker
from rl_cluster.files.sealed_weights import seal_weights
from rl_cluster.processes import alive, this_process, this_realm

UNKNOWN_SWAP_SECONDS = 120.0
"""A folder set aside on another machine this long ago is of a dead swap, which takes milliseconds."""
UNKNOWN_NEW_SECONDS = 24 * 3600.0
"""A half-made folder of another machine that nothing was written into for so long is of a dead process."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Complete or absent, also after a power cut: temporary file, fsync, rename, fsync of the folder."""
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextlib.contextmanager
def folder_atomically(target: Path, kind: str = "folder") -> Iterator[Path]:
    """replace_folder for the files of a run: an OSError (a full disk) becomes CheckpointError, and one that a
    worker raises names the target too."""
    try:
        with replace_folder(target, kind) as fresh:
            yield fresh
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"{target} could not be written: {error}. Free space or choose another run.dir; what was written "
            "before is untouched."
        ) from error


@contextlib.contextmanager
def replace_folder(target: Path, kind: str) -> Iterator[Path]:
    """A new folder to fill, renamed to `target` at the end; on failure removed, `target` untouched.

    An older `target` of the same kind is set aside, and deleted when the new one is in its place; what others
    have put into it moves over. Raises BadInputError where it is not of ours (own_folders.check_replaceable),
    and OSError.
    """
    recover_folder(target)
    check_replaceable(target, kind)
    fresh = _beside(target, "new")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        check_replaceable(target, kind)
        write_marker(fresh, kind)
        seal_weights(fresh)
        keep_foreign_files(target, fresh)
        sync_tree(fresh)
        _swap(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def recover_folder(target: Path) -> None:
    """Where a crash came between the two renames of a swap, the older folder comes back; what dead processes
    left beside `target` is removed."""
    leftovers = _leftovers(target)
    # Another process may be at the same recovery.
    with contextlib.suppress(FileNotFoundError):
        aside = [one for one in leftovers if one.role != "new" and one.is_dead(UNKNOWN_SWAP_SECONDS)]
        if aside and not os.path.lexists(target):
            newest = max(aside, key=lambda one: one.path.lstat().st_ctime)
            newest.path.rename(target)
            _sync_folder(target.parent)
        for one in leftovers:
            if one.role != "earlier" and one.path.exists() and one.is_dead(UNKNOWN_NEW_SECONDS):
                shutil.rmtree(one.path, ignore_errors=True)


def recover_folders_in(parent: Path) -> None:
    """recover_folder for every folder that has, or had, its place in `parent`, unless that is read-only."""
    if not os.access(parent, os.W_OK | os.X_OK):
        return
    names = {found["name"] for entry in _entries(parent) if (found := _LEFTOVER.fullmatch(entry.name))}
    for name in sorted(names):
        recover_folder(parent / name)


def set_aside(target: Path, role: str = "old") -> Path:
    """Rename a folder out of the way; recover_folder brings it back should this process die now.

    role: "old" may be deleted as soon as there is a new one; "earlier" only by who has set it aside.
    """
    aside = _beside(target, role)
    target.rename(aside)
    return aside


def sync_tree(folder: Path) -> None:
    """fsync of every file and folder, so that a rename cannot overtake what it names."""
    for path, _, files in os.walk(folder):
        for name in files:
            if not os.path.islink(os.path.join(path, name)):
                _sync_file(Path(path) / name)
        _sync_folder(Path(path))


def _swap(fresh: Path, target: Path) -> None:
    aside = set_aside(target) if os.path.lexists(target) else None
    try:
        fresh.rename(target)
    except BaseException:
        if aside is not None and not os.path.lexists(target):
            aside.rename(target)
        raise
    _sync_folder(target.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


_LEFTOVER = re.compile(
    r"\.(?P<name>.+)\.(?P<role>new|old|earlier)-(?P<realm>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{8}"
)


@dataclass(frozen=True)
class _Leftover:
    path: Path
    role: str
    realm: str
    pid: int
    started: int

    def is_dead(self, unknown_seconds: float) -> bool:
        """unknown_seconds: without a change, after which a process of another machine counts as dead."""
        if self.realm == this_realm():
            return not alive(self.pid, self.started)
        return time.time() - _last_change(self.path) > unknown_seconds


def _beside(target: Path, role: str) -> Path:
    me = this_process()
    writer = f"{me.realm}-{me.pid}-{int(me.started)}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.name}.{role}-{writer}")


def _leftovers(target: Path) -> list[_Leftover]:
    found = [(entry, _LEFTOVER.fullmatch(entry.name)) for entry in _entries(target.parent)]
    return [
        _Leftover(entry, match["role"], match["realm"], int(match["pid"]), int(match["started"]))
        for entry, match in found
        if match is not None and match["name"] == target.name
    ]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _last_change(folder: Path) -> float:
    """Seconds since 1970, of anything in it; a rename counts."""
    times = [folder.lstat().st_ctime]
    for path, folders, files in os.walk(folder):
        times += [os.lstat(os.path.join(path, name)).st_ctime for name in (*folders, *files)]
    return max(times)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
