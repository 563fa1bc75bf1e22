"""This process's hold on a run folder: its lock, and a record of what the start makes there, to undo it.

A front that prepares files claims the folder first; the run then takes the claim over (`begin`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rl_cluster.errors import BadInputError
from rl_cluster.files.atomic import recover_folder, set_aside
from rl_cluster.files.own_folders import MARKER, is_ours, write_marker
from rl_cluster.run_folder.lock import LOCK, RunLock, holder_of, is_lock_file

START = "start"
ATTEMPTS = 20
"""At making a folder that a refused start removes at the same time."""


class RunClaim:
    """Made by `claim_new` or `claim_old`; ends with `undo` or `release`."""

    def __init__(self, path: Path, lock: RunLock, made: Sequence[Path], earlier: Path | None = None) -> None:
        """made: the folders that were made for it, outermost first. earlier: the run that it overwrites."""
        self.path = path
        self.lock = lock
        self.has_begun = False
        self._pid = os.getpid()
        self._folders = list(made)
        self._whole: list[Path] = []
        self._earlier = earlier

    @property
    def overwrites(self) -> bool:
        return self._earlier is not None

    def note(self, *paths: Path) -> None:
        """This process is about to make them, with all that will be in them; what is there already is not
        noted. Call it before writing."""
        self._whole += [path for path in paths if not os.path.lexists(path) and path not in self._whole]

    def make_folder(self, path: Path) -> None:
        """With those above it; each goes again by `undo` if it was made here and is empty then."""
        self._folders += _make_folders(path)

    def keep(self) -> None:
        """The run has begun: nothing is undone any more, and what it overwrites is deleted."""
        self._folders.clear()
        self._whole.clear()
        if self._earlier is not None:
            shutil.rmtree(self._earlier, ignore_errors=True)
            self._earlier = None

    def undo(self) -> None:
        """Delete what was made, and nothing else; an overwritten run comes back. A forked child deletes
        nothing."""
        if self._pid != os.getpid():
            return
        for path in reversed(self._whole):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        self._whole.clear()
        self.release()
        for folder in reversed(self._folders):
            with contextlib.suppress(OSError):  # not empty: others have put something there
                folder.rmdir()
        self._folders.clear()
        if self._earlier is not None and not os.path.lexists(self.path):
            os.rename(self._earlier, self.path)
            self._earlier = None

    def release(self) -> None:
        """Give up the lock. The second call does nothing."""
        with _GUARD:
            if _CLAIMS.get(_key(self.path)) is self:
                del _CLAIMS[_key(self.path)]
        self.lock.release()


_CLAIMS: dict[str, RunClaim] = {}
_GUARD = threading.RLock()


def claim_new(path: Path, overwrite: bool = False) -> RunClaim:
    """For a run that is being prepared: a claim that this process has and that no run has taken over, or a
    new one. overwrite: an earlier run there is set aside.

    Raises BadInputError: not empty, in use, a file, read-only.
    """
    with _GUARD:
        known = _CLAIMS.get(_key(path))
        if known is not None and not known.has_begun:
            return known
        check_unused(path, overwrite)
        try:
            claim = _claim(path, overwrite)
        except OSError as error:
            raise BadInputError(
                f"run.dir = {path}: cannot be written: {error}. Choose another folder."
            ) from error
        _CLAIMS[_key(path)] = claim
        return claim


def begin_new(path: Path) -> RunClaim:
    """claim_new for the run itself: from now on nobody else of this process may have it."""
    with _GUARD:
        claim = claim_new(path)
        claim.has_begun = True
        return claim


def begin_old(path: Path) -> RunClaim:
    """For a run that goes on in its folder. Raises BadInputError where another has it."""
    with _GUARD:
        try:
            claim = RunClaim(path, RunLock.acquire(path), ())
        except OSError as error:
            raise BadInputError(
                f"run.dir = {path}: cannot be written: {error}. Make it writable, or copy the run."
            ) from error
        claim.has_begun = True
        _CLAIMS[_key(path)] = claim
        return claim


@contextlib.contextmanager
def preparing(path: Path | Callable[[], Path], overwrite: bool = False) -> Iterator[RunClaim]:
    """claim_new, for the time until its run has begun: where none begins, everything is undone.

    path: a function gives one that is free now; where another start was faster, it is asked again.
    """
    claim = claim_new(path, overwrite) if isinstance(path, Path) else _claim_free(path)
    try:
        yield claim
    finally:
        if not claim.has_begun:
            claim.undo()


def _claim_free(choose: Callable[[], Path]) -> RunClaim:
    for _ in range(ATTEMPTS):
        with _GUARD:  # other threads of this process choose after this claim
            path = choose()
            try:
                return claim_new(path)
            except BadInputError:
                if not os.path.lexists(path):  # not taken: it cannot be written
                    raise
    return claim_new(choose())


def claim_of(path: Path) -> RunClaim | None:
    """This process's claim on a run folder, or on the one that `path` lies in."""
    with _GUARD:
        return next((_CLAIMS[key] for one in (path, *path.parents) if (key := _key(one)) in _CLAIMS), None)


def make_room(target: Path) -> Path:
    """The folders above `target`; in a run folder that is being prepared, they and `target` are noted as made
    by this process. Returns `target`."""
    claim = claim_of(target.absolute())
    if claim is None:
        target.parent.mkdir(parents=True, exist_ok=True)
        return target
    claim.make_folder(target.absolute().parent)
    claim.note(target.absolute())
    return target


def check_unused(path: Path, overwrite: bool = False) -> None:
    """Raise BadInputError where a new run may not be written: used, a file, or not writable.

    A folder that this process prepares is new, and so is one with nothing but the files of a start that did
    not come to its run (the library's fronts put models and prompts into start/ first).
    """
    known = _CLAIMS.get(_key(path))
    if known is not None and not known.has_begun:
        return
    if path.is_file():
        raise BadInputError(f"run.dir = {path}: is a file. Give a folder that does not exist yet.")
    holder = holder_of(path) if path.is_dir() else None
    if holder is not None:
        raise BadInputError(
            f"run.dir = {path}: is in use by {holder}. Choose another folder, or wait for its end."
        )
    if not overwrite:
        _refuse_used(path)
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir():
        raise BadInputError(f"run.dir = {path}: {parent} is a file. Choose another folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise BadInputError(f"run.dir = {path}: {parent} is read-only for you. Choose another folder.")


def _refuse_used(path: Path) -> None:
    ours = (MARKER, START) if is_ours(path, "run") else ()
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    if any(name not in ours and not is_lock_file(name) for name in names):
        raise BadInputError(
            f"run.dir = {path}: is not empty. Choose another folder, or go on with it: train --resume {path}."
        )


def _claim(path: Path, overwrite: bool) -> RunClaim:
    """Only the one that creates the lock goes on; until then nothing but empty folders is made."""
    recover_folder(path)
    made, lock = _locked_folder(path)
    earlier = None
    try:
        if overwrite and _is_used(path):
            lock, earlier = _aside(path, lock)
            made = [*made, path]
        _refuse_used(path)
    except BaseException:
        RunClaim(path, lock, made, earlier).undo()
        raise
    claim = RunClaim(path, lock, made, earlier)
    claim.note(path / MARKER)
    write_marker(path, "run")
    return claim


def _aside(path: Path, lock: RunLock) -> tuple[RunLock, Path]:
    """An earlier run out of the way, and the lock of a folder that is new."""
    earlier = set_aside(path, "earlier")
    lock.release()
    try:
        (earlier / LOCK).unlink(missing_ok=True)
        path.mkdir()
        return RunLock.acquire(path), earlier
    except BaseException:
        if not os.path.lexists(path):
            os.rename(earlier, path)
        raise


def _is_used(path: Path) -> bool:
    return any(not is_lock_file(entry.name) for entry in path.iterdir())


def _locked_folder(path: Path) -> tuple[list[Path], RunLock]:
    made: list[Path] = []
    for attempt in range(1, ATTEMPTS + 1):
        try:
            made += _make_folders(path)
            return made, RunLock.acquire(path)
        except FileNotFoundError:  # removed by a start that was refused
            if attempt == ATTEMPTS:
                raise
        except BaseException:
            for folder in reversed(made):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
    raise AssertionError("the last attempt returns or raises")


def _make_folders(path: Path) -> list[Path]:
    """Those that were not there, outermost first; mkdir without exist_ok tells who has made each."""
    made = []
    for folder in (*reversed(path.parents), path):
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError:  # such as / on a read-only disk
            if not folder.is_dir():
                raise
            continue
        made.append(folder)
    return made


def _key(path: Path) -> str:
    return os.path.realpath(path)


@atexit.register
def _end_claims() -> None:
    """A start that was prepared and never begun leaves nothing."""
    for claim in list(_CLAIMS.values()):
        claim.release() if claim.has_begun else claim.undo()
