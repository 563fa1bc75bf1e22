"""A checkpoint is a folder that is there complete or not at all, whatever happens while it is written."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rl_cluster.errors import BadInputError, CheckpointError

ROOT = "checkpoints"
Written = TypeVar("Written")


def folder_for(name: Any) -> Path:
    """checkpoints/NAME below the working directory; an absolute path as it is. Raises BadInputError."""
    if not isinstance(name, (str, Path)) or not str(name).strip() or ".." in Path(name).parts:
        raise BadInputError(
            f"name: {name!r} cannot name a checkpoint; give a name such as 'step-100', saved below {ROOT}/, "
            "or an "
            "absolute path"
        )
    folder = Path.cwd() / ROOT / name
    if folder == Path.cwd() / ROOT:
        raise BadInputError(
            f"name: {str(name)!r} is the folder of all checkpoints; give a name such as 'step-100'"
        )
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"name: {folder} is a file; choose another name")
    return folder


def existing_folder(path: Any) -> Path:
    """A path as save_state returned it, or the name that it was given. Raises BadInputError."""
    if not isinstance(path, (str, Path)) or not str(path).strip():
        raise BadInputError(f"path: {path!r} is no path; give the 'path' that save_state returned")
    for folder in (Path(path), Path(ROOT) / path):
        if folder.is_dir():
            return folder.absolute()
    raise BadInputError(
        f"path: there is no checkpoint {path} ({Path(path).absolute()}); save_state returns the path"
    )


def write_folder(folder: Path, write: Callable[[Path], Written]) -> Written:
    """Let `write` fill a new folder beside `folder`, then put it in its place. Raises CheckpointError.

    An older checkpoint of that name stays until the new one is complete and on the disk.
    """
    suffix = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    fresh, old = (folder.with_name(f".{folder.name}.{kind}-{suffix}") for kind in ("new", "old"))
    try:
        fresh.mkdir(parents=True)
        written = write(fresh)
        _flush(fresh)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        _flush_directory(folder.parent)
    except OSError as error:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise CheckpointError(
            f"{folder}: not saved, {error}; an older checkpoint there is untouched"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return written


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_directory(path)
    _flush_directory(folder)


def _flush_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
