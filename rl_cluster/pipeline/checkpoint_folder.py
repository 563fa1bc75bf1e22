"""A checkpoint is a folder that is there complete or not at all, whatever happens while it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.files.atomic import recover_folder, replace_folder
from rl_cluster.files.manifest import MANIFEST, problem_with, write_manifest
from rl_cluster.files.own_folders import check_replaceable, read_marker

ROOT = "checkpoints"
KIND = "pipeline state"
Written = TypeVar("Written")


def folder_for(name: Any) -> Path:
    """checkpoints/NAME below the working directory; an absolute path as it is. Raises BadInputError."""
    if (
        not isinstance(name, (str, Path))
        or not str(name).strip()
        or "\0" in str(name)
        or ".." in Path(name).parts
    ):
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
    check_replaceable(folder, KIND, f"name: {str(name)!r} ({folder})")
    return folder


def existing_folder(path: Any) -> Path:
    """A path as save_state returned it, or the name that it was given. Raises BadInputError."""
    if not isinstance(path, (str, Path)) or not str(path).strip():
        raise BadInputError(f"path: {path!r} is no path; give the 'path' that save_state returned")
    for folder in (Path(path), Path(ROOT) / path):
        recover_folder(folder)
        if folder.is_dir():
            return folder.absolute()
    raise BadInputError(
        f"path: there is no checkpoint {path} ({Path(path).absolute()}); save_state returns the path"
    )


def check_whole(folder: Path) -> None:
    """Raise CheckpointError naming the file that is not as save_state wrote it, BadInputError where it is
    missing. Folders of earlier versions, without a manifest, are not examined."""
    listed = (read_marker(folder) or {}).get("files", [])
    if not (folder / MANIFEST).exists() and MANIFEST not in listed:
        return
    problem = problem_with(folder)
    if problem is None:
        return
    name, _, what = problem.partition(" ")
    if what == "is missing":
        raise BadInputError(
            f"path: {folder / name} is missing; {folder} is no whole checkpoint of save_state"
        )
    raise CheckpointError(f"{folder / name}: damaged, it {what}; load another checkpoint")


def write_folder(folder: Path, write: Callable[[Path], Written]) -> Written:
    """Let `write` fill a new folder beside `folder`, then put it in its place. Raises CheckpointError.

    An older checkpoint of that name stays until the new one is complete and on the disk.
    """
    try:
        with replace_folder(folder, KIND) as fresh:
            written = write(fresh)
            write_manifest(fresh)
            return written
    except OSError as error:
        raise CheckpointError(
            f"{folder}: not saved, {error}; an older checkpoint there is untouched"
        ) from error
