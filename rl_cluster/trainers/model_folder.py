"""Where save_model writes: a folder of its own, or that of the very run, which gets the model's files too."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.files.atomic import folder_atomically, sync_tree
from rl_cluster.files.own_folders import MARKER, check_replaceable, files_in, note_files, path_to_write
from rl_cluster.files.sealed_weights import seal_weights


@dataclass(frozen=True)
class ModelTarget:
    """is_run: the folder of the run, as TRL's scripts give it (save_model(args.output_dir))."""

    path: Path
    is_run: bool


def model_target(value: Any, field: str, run_dir: Path | None = None) -> ModelTarget:
    """field: whose argument `value` is. Raises BadInputError unless it is missing, empty, or ours."""
    path = path_to_write(value, field)
    if run_dir is not None and path.is_dir() and run_dir.is_dir() and path.samefile(run_dir):
        return ModelTarget(path, True)
    check_replaceable(path, "model", f"{field}={os.fspath(value)!r}")
    return ModelTarget(path, False)


def copy_model(model: Path, target: ModelTarget) -> Path:
    """A model's folder into the target; the folder itself stays as it is. Returns the target's path."""
    if not (target.path.is_dir() and target.path.samefile(model)):
        with folder_of_model(target) as partial:
            shutil.copytree(model, partial, dirs_exist_ok=True)
    return target.path


@contextlib.contextmanager
def folder_of_model(target: ModelTarget) -> Iterator[Path]:
    """A folder to fill with the model's files, which are at the target in the end, complete."""
    if not target.is_run:
        with folder_atomically(target.path, "model") as partial:
            yield partial
        return
    try:
        with tempfile.TemporaryDirectory(dir=target.path, prefix=".model-") as name:
            yield Path(name)
            sync_tree(Path(name))
            _move_in(Path(name), target.path)
    except OSError as error:
        raise CheckpointError(
            f"{target.path}: the model could not be written: {error}. Free space."
        ) from error


def _move_in(made: Path, folder: Path) -> None:
    """Each file is replaced as a whole; BadInputError, before any is, where a folder has its name."""
    names = [name for name in files_in(made) if name != MARKER]
    for name in names:
        if (folder / name).is_dir():
            raise BadInputError(
                f"save_model: {folder / name} is a folder, and the model has a file of that name."
            )
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(made / name, folder / name)
    note_files(folder, names)
    seal_weights(folder, names)
