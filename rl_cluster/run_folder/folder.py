"""The schema of a run folder: what training writes, `--resume`, the exporter and a viewer read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from rl_cluster.config.base import Config
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.reading.load import apply_override, dump_config, parse_as, read_mapping
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.files.atomic import recover_folder, recover_folders_in, write_atomically
from rl_cluster.files.json_lines import read_steps
from rl_cluster.run_folder.claim import START, RunClaim, begin_new, begin_old, claim_of, preparing

MADE_BY_RUNS = (
    *("config.yaml", "metrics.jsonl", "alarms.jsonl", "samples.jsonl", "ledger.json", "reference.npz"),
    *("logs", "checkpoints", "trajectories", "tensorboard", "wandb", "model", "adapter", "starts"),
    *(f"{START}/scratch", f"{START}/supervised"),
)


AnyConfig = TypeVar("AnyConfig", RunConfig, FitConfig)
Kind = TypeVar("Kind", bound=Config)


@dataclass(frozen=True)
class RunFolder:
    """Paths only; nothing is created by naming them.

    config.yaml            the resolved configuration
    start/                 what the run begins with, where that is not a file already: models, prompts
    metrics.jsonl          one object per step, with `step` and `time` (seconds since 1970)
    alarms.jsonl           what the section `health` warned of: step, metric, message
    samples.jsonl          the sampled completions that were shown: step, query, response, score
    trajectories/          step-N.parquet, every trained sequence token by token
    checkpoints/step-N/    complete or absent; learner/, critic/, loop.json, manifest.json
    starts/                of a run that was gone on with: the configuration of every start, starts.jsonl
    model/                 the result, an ordinary Hugging Face folder with its card
    tensorboard/           event files
    ledger.json            the state of every prompt group at the end
    reference.npz          of a fit: the reference's log-probability of every row
    logs/                  run.log and what the workers wrote
    run.lock               while a process trains here: which, and its heartbeat
    .rl_cluster.json       says that the folder is a run of this project
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def alarms(self) -> Path:
        return self.path / "alarms.jsonl"

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
        return self.read_config_as(RunConfig)

    def read_config_as(self, kind: type[Kind], overrides: Sequence[str] = ()) -> Kind:
        """config.yaml with overrides as load_as takes them. Where the folder was moved or copied, run.dir and
        the paths into start/ are those of now."""
        data = _at_home(read_mapping(self.config), self.path)
        for override in overrides:
            data = apply_override(data, override)
        return parse_as(kind, data, source=str(self.config))

    def read_metrics(self) -> list[dict[str, Any]]:
        """One dict per step; a line that a crash cut short ends the list. Raises BadInputError for another
        line that is no row."""
        if not self.metrics.is_file():
            raise BadInputError(f"{self.path}: there is no metrics.jsonl, so this is not a run folder.")
        return [row for _, row in read_steps(self.metrics)]


def _at_home(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """The configuration that a run has written, for the place where its folder is now."""
    section = data.get("run")
    if not isinstance(section, dict) or not isinstance(section.get("dir"), str):
        return data
    before = os.path.join(os.path.expanduser(section["dir"]), START) + os.sep

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [moved(inner) for inner in value]
        if not isinstance(value, str):
            return value
        # A relative run.dir is what an absolute path ends with, before start/.
        head, found, tail = value.rpartition(before)
        is_inside = found and (not head or (not os.path.isabs(before) and head.endswith(os.sep)))
        return str(path / START / tail) if is_inside else value

    return {**moved(data), "run": {**section, "dir": str(path)}}


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


@contextlib.contextmanager
def preparing_run(config: AnyConfig) -> Iterator[AnyConfig]:
    """The configuration with its run.dir, which this process holds until its run has begun; a name that is
    chosen here is one that no other start has."""
    if config.run.dir is not None:
        with preparing(run_dir_of(config)):
            yield config
        return
    with preparing(lambda: run_dir_of(resolve_run_dir(config))) as claim:
        section = config.run.model_copy(update={"dir": str(claim.path)})
        yield config.model_copy(update={"run": section})


def run_dir_of(config: RunConfig | FitConfig) -> Path:
    """run.dir as an absolute path, for workers whose working directory is another."""
    assert config.run.dir is not None, "resolve_run_dir first"
    return Path(config.run.dir).expanduser().absolute()


def create_run_folder(config: RunConfig | FitConfig) -> RunFolder:
    """Make the folder and write config.yaml. Raises BadInputError (read-only, used, no space)."""
    claim = _begin(config)
    claim.keep()
    claim.release()
    return RunFolder(claim.path)


@contextlib.contextmanager
def new_run_folder(config: RunConfig | FitConfig) -> Iterator[RunFolder]:
    """create_run_folder, held by this process for the time of a run. Bad input that is found before the first
    metrics, such as a malformed row, leaves nothing behind, so that the corrected command can use the same
    folder; what this process has not made stays as it is."""
    claim = _begin(config)
    folder = RunFolder(claim.path)
    try:
        yield folder
    except BaseException as error:
        is_undone = isinstance(error, BadInputError) and not _has_metrics(folder)
        if is_undone or claim.overwrites:
            claim.undo()
        raise
    finally:
        claim.release()


@contextlib.contextmanager
def held_run_folder(path: str | Path) -> Iterator[RunFolder]:
    """open_run_folder of a run that goes on, held by this process meanwhile. BadInputError: in use."""
    folder = open_run_folder(path)
    claim = begin_old(folder.path)
    try:
        yield folder
    finally:
        claim.release()


def run_has_begun(folder: RunFolder) -> None:
    """Its workers are up: from now on bad input undoes nothing, and an overwritten run is gone."""
    claim = claim_of(folder.path)
    assert claim is not None, "inside new_run_folder or held_run_folder only"
    claim.keep()


def _begin(config: RunConfig | FitConfig) -> RunClaim:
    path = run_dir_of(config)
    claim = begin_new(path)
    folder = RunFolder(path)
    claim.note(*(path / name for name in MADE_BY_RUNS))
    try:
        for inner in (folder.logs, folder.checkpoints, folder.trajectories):
            inner.mkdir(exist_ok=True)
        claim.make_folder(path / START)
        _write_config(folder, config)
    except OSError as error:
        claim.undo()
        raise BadInputError(
            f"run.dir = {path}: cannot be written: {error}. Choose another folder."
        ) from error
    except BaseException:
        claim.undo()
        raise
    return claim


def _write_config(folder: RunFolder, config: RunConfig | FitConfig) -> None:
    """With run.dir as an absolute path, by which a moved folder's paths are told from others."""
    section = config.run.model_copy(update={"dir": str(folder.path)})
    write_atomically(folder.config, dump_config(config.model_copy(update={"run": section})))


def _has_metrics(folder: RunFolder) -> bool:
    return folder.metrics.is_file() and folder.metrics.stat().st_size > 0


def open_run_folder(path: str | Path) -> RunFolder:
    """An existing run, for --resume, eval and plots. Raises BadInputError where it is none."""
    folder = RunFolder(Path(path).expanduser().absolute())
    recover_folder(folder.path)
    for place in (folder.path, folder.checkpoints, folder.path / START):
        recover_folders_in(place)
    if not folder.config.is_file():
        raise BadInputError(f"{path}: there is no config.yaml, so this is not a run folder. Give one.")
    return folder
