"""The schema of a run folder: what training writes, `--resume`, the exporter and a viewer read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from rl_cluster.config.fit import FitConfig
from rl_cluster.config.load import dump_config, load_config
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError, CheckpointError

START = "start"


@dataclass(frozen=True)
class RunFolder:
    """Paths only; nothing is created by naming them.

    config.yaml            the resolved configuration
    start/                 what the run begins with, where that is not a file already: models, prompts
    metrics.jsonl          one object per step, with `step` and `time` (seconds since 1970)
    samples.jsonl          the sampled completions that were shown: step, query, response, score
    trajectories/          step-N.parquet, every trained sequence token by token
    checkpoints/step-N/    complete or absent; learner/, critic/, loop.json
    model/                 the result, an ordinary Hugging Face folder with its card
    tensorboard/           event files
    ledger.json            the state of every prompt group at the end
    reference.npz          of a fit: the reference's log-probability of every row
    logs/                  run.log and what the workers wrote
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.json"

    @property
    def reference(self) -> Path:
        return self.path / "reference.npz"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def log(self) -> Path:
        return self.logs / "run.log"

    def read_config(self) -> RunConfig:
        return load_config(self.config)

    def read_metrics(self) -> list[dict[str, Any]]:
        """One dict per step; a line that a crash cut short ends the list."""
        if not self.metrics.is_file():
            raise BadInputError(f"{self.path}: there is no metrics.jsonl, so this is not a run folder.")
        rows = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows


AnyConfig = TypeVar("AnyConfig", RunConfig, FitConfig)


def resolve_run_dir(config: AnyConfig, now: datetime | None = None) -> AnyConfig:
    """Fill in run.dir: runs/NAME-DATE-TIME, with -2, -3 … where that is taken."""
    if config.run.dir is not None:
        return config
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{config.run.name}-{stamp}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    section = config.run.model_copy(update={"dir": str(path)})
    return config.model_copy(update={"run": section})


def run_dir_of(config: RunConfig | FitConfig) -> Path:
    """run.dir as an absolute path, for workers whose working directory is another."""
    assert config.run.dir is not None, "resolve_run_dir first"
    return Path(config.run.dir).expanduser().absolute()


def check_unused(path: Path) -> None:
    """Raise BadInputError where a new run may not be written: used, a file, or not writable.

    A folder that holds nothing but start/ is new: the library's fronts put models and prompts there first.
    """
    if path.is_file():
        raise BadInputError(f"run.dir = {path}: is a file. Give a folder that does not exist yet.")
    if path.is_dir() and any(entry.name != START for entry in path.iterdir()):
        raise BadInputError(
            f"run.dir = {path}: is not empty. Choose another folder, or go on with it: train --resume {path}."
        )
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir():
        raise BadInputError(f"run.dir = {path}: {parent} is a file. Choose another folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise BadInputError(f"run.dir = {path}: {parent} is read-only for you. Choose another folder.")


def create_run_folder(config: RunConfig | FitConfig) -> RunFolder:
    """Make the folder and write config.yaml. Raises BadInputError (read-only, used, no space)."""
    path = run_dir_of(config)
    check_unused(path)
    folder, was_there = RunFolder(path), path.exists()
    try:
        for inner in (folder.path, folder.logs, folder.checkpoints, folder.trajectories):
            inner.mkdir(parents=True, exist_ok=True)
        write_atomically(folder.config, dump_config(config))
    except OSError as error:
        _clear(path, keep=was_there)
        raise BadInputError(
            f"run.dir = {path}: cannot be written: {error}. Choose another folder."
        ) from error
    return folder


def go_on_in_run_folder(config: RunConfig | FitConfig) -> RunFolder:
    """The folder of the run that is resumed; config.yaml becomes the configuration of now."""
    folder = open_run_folder(run_dir_of(config))
    write_atomically(folder.config, dump_config(config))
    return folder


@contextlib.contextmanager
def new_run_folder(config: RunConfig | FitConfig) -> Iterator[RunFolder]:
    """create_run_folder, for the time of a run. Bad input that is found before the first metrics, such as a
    malformed row, leaves nothing behind, so that the corrected command can use the same folder."""
    was_there = run_dir_of(config).exists()
    folder = create_run_folder(config)
    try:
        yield folder
    except BadInputError:
        if not (folder.metrics.is_file() and folder.read_metrics()):
            _clear(folder.path, keep=was_there)
        raise


def _clear(path: Path, keep: bool) -> None:
    """Remove the folder, or, where the user had made it, only what is in it."""
    for inner in path.iterdir() if path.is_dir() else ():
        if inner.is_dir():
            shutil.rmtree(inner)
        else:
            inner.unlink()
    if path.is_dir() and not keep:
        path.rmdir()


def open_run_folder(path: str | Path) -> RunFolder:
    """An existing run, for --resume, eval and plots. Raises BadInputError where it is none."""
    folder = RunFolder(Path(path).expanduser().absolute())
    if not folder.config.is_file():
        raise BadInputError(f"{path}: there is no config.yaml, so this is not a run folder. Give one.")
    return folder


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
def folder_atomically(target: Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `target` at the end; on failure removed, `target` untouched.

    An OSError (a full disk) becomes CheckpointError, and one that a worker raises names the target too.
    """
    partial = target.with_name(f".partial-{target.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for file in sorted(partial.rglob("*")):
            if file.is_file():
                _sync_file(file)
        if target.exists():
            shutil.rmtree(target)
        os.replace(partial, target)
        _sync_folder(target.parent)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"{target} could not be written: {error}. Free space or choose another run.dir; what was written "
            "before is untouched."
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
