"""Going on with a run: its folder and the settings of now in, the checkpoint to go on from out; and the
record of every start, so that config.yaml always says what trains."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from rl_cluster.config.fit import FitConfig
from rl_cluster.config.reading.changes import Changes, check_last_step, check_overrides, describe_changes
from rl_cluster.config.reading.load import dump_config
from rl_cluster.config.run import RunConfig
from rl_cluster.files.atomic import write_atomically
from rl_cluster.loop.checkpoints import Chosen, State, choose_checkpoint, set_aside_later
from rl_cluster.loop.state import LoopState
from rl_cluster.metrics.observer import RunObserver
from rl_cluster.run_folder.folder import RunFolder


@dataclass(frozen=True)
class GoingOn(Generic[State]):
    """changes: of the settings, against those of the start before."""

    checkpoint: Path
    state: State
    changes: Changes
    notes: tuple[str, ...]

    def take_over(self, folder: RunFolder) -> tuple[str, ...]:
        """From now on the run is at this checkpoint: later ones are set aside. Returns what to tell."""
        moved = set_aside_later(folder.checkpoints, self.state.step)
        notes = [*self.notes, f"going on from step {self.state.step} ({self.checkpoint})"]
        notes += [f"a later checkpoint was set aside: {path}" for path in moved]
        if self.changes:
            notes.append(f"changed settings: {describe_changes(self.changes)}")
        return tuple(notes)


def going_on(
    folder: RunFolder,
    config: RunConfig | FitConfig,
    read: Callable[[Path], State],
    step: int | None = None,
    force_changes: bool = False,
) -> GoingOn[State]:
    """Where a run goes on; nothing is changed yet. Raises BadInputError for settings that a resumed run may
    not change and for a step without a whole checkpoint, CheckpointError where none is whole."""
    before = folder.read_config_as(type(config))
    own = before.run.model_copy(update={"dir": config.run.dir})
    found = check_overrides(before.model_copy(update={"run": own}), config, force_changes)
    chosen: Chosen[State] = choose_checkpoint(folder.checkpoints, read, step)
    return GoingOn(chosen.path, chosen.state, found, chosen.notes)


def point_to_go_on(
    folder: RunFolder, config: RunConfig, step: int | None = None, force_changes: bool = False
) -> GoingOn[LoopState]:
    """As going_on; refuses a run.steps before the checkpoint, too."""
    start = going_on(folder, config, LoopState.read, step, force_changes)
    check_last_step("run.steps", config.run.steps, start.state.step)
    return start


def record_start(folder: RunFolder, config: RunConfig | FitConfig, step: int, found: Changes) -> None:
    """config.yaml becomes `config`. starts/ keeps the configuration of every start, and starts.jsonl when
    each was, from which step and with which changes."""
    starts = folder.path / "starts"
    if not starts.is_dir():
        starts.mkdir()
        write_atomically(starts / "start-1.yaml", folder.config.read_bytes())
    number = 1 + sum(1 for _ in starts.glob("start-*.yaml"))
    text = dump_config(config)
    write_atomically(starts / f"start-{number}.yaml", text)
    row: dict[str, Any] = {"start": number, "time": time.time(), "step": step, "changes": found}
    with open(starts / "starts.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    write_atomically(folder.config, text)


def tell(observer: RunObserver, folder: RunFolder, notes: Sequence[str]) -> None:
    """On the screen and in the run's log."""
    for note in notes:
        observer.note(note)
    if notes:
        with open(folder.log, "a", encoding="utf-8") as file:
            file.writelines(f"{note}\n" for note in notes)
