"""A folder of checkpoints in, the one to go on from out: proven whole, or what is wrong with each."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.files.manifest import MANIFEST, problem_with, read_json, read_manifest
from rl_cluster.files.own_folders import files_in

STATE_FILE = "loop.json"
LEARNER, CRITIC = "learner", "critic"
SET_ASIDE = "set-aside"
FORMAT = 2
"""Of loop.json. 1 had no such field, and its folder no manifest."""

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")

State = TypeVar("State", bound="HasStep")


class HasStep(Protocol):
    """What every state in a loop.json has."""

    @property
    def step(self) -> int: ...


@dataclass(frozen=True)
class Chosen(Generic[State]):
    """notes: what the user must hear of the choice; they have been given as warnings already."""

    path: Path
    state: State
    notes: tuple[str, ...] = ()


def step_of(name: str) -> int | None:
    """The step that a checkpoint's name says; None for every other name, such as step-007 or step-²."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match.group(1))


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the folders that are named as checkpoints are, whole or not, in order."""
    if not folder.is_dir():
        return []
    return sorted(s for path in folder.iterdir() if (s := step_of(path.name)) is not None and path.is_dir())


def problem_of(folder: Path) -> str | None:
    """Why the folder is no whole checkpoint; None where it is one. Reads every file."""
    if not (folder / MANIFEST).exists() and _format_of(folder) == 1:
        return _problem_of_old_format(folder)
    problem = problem_with(folder)
    if problem is not None:
        return problem
    names = read_manifest(folder).files
    if STATE_FILE not in names:
        return f"{MANIFEST} does not list {STATE_FILE}"
    if not any(name.startswith(f"{LEARNER}/") for name in names):
        return "there is no learner state in it"
    return None


def read_whole(
    folder: Path, read: Callable[[Path], State], step: int | None = None, needs: str | None = None
) -> State:
    """The state of a checkpoint whose files are all as written. Raises CheckpointError that says what is not.

    step: the one that the folder's name says. needs: a file that must be there, too.
    """
    problem = problem_of(folder)
    if problem is None and needs is not None and not (folder / needs).is_file():
        problem = f"{needs} is missing"
    if problem is not None:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {problem}")
    state = read(folder)
    if step is not None and state.step != step:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: {STATE_FILE} says step {state.step}, the folder {step}"
        )
    if _format_of(folder) == 1:
        warnings.warn(_of_old_format(folder), stacklevel=3)
    return state


def choose_checkpoint(
    folder: Path, read: Callable[[Path], State], step: int | None = None, needs: str | None = None
) -> Chosen[State]:
    """The newest whole checkpoint of a run, or exactly that of `step`; what was passed over is a warning.

    Raises BadInputError for a step that is not there or not whole (it lists those that are), and
    CheckpointError where no checkpoint is whole: it names each with its fault.
    """
    if step is not None:
        return _exactly(folder, read, step, needs)
    faults: dict[int, str] = {}
    for candidate in reversed(checkpoint_steps(folder)):
        path = folder / f"step-{candidate}"
        try:
            state = read_whole(path, read, candidate, needs)
        except CheckpointError as error:
            faults[candidate] = _fault(path, error)
            continue
        return Chosen(path, state, _passed_over(folder, candidate, faults))
    if not faults:
        raise CheckpointError(
            f"no checkpoint in {folder}; was checkpoint.every or checkpoint.minutes set in the first run?"
        )
    listed = "\n".join(f"  step-{s}: {fault}" for s, fault in faults.items())
    raise CheckpointError(
        f"no checkpoint in {folder} is whole:\n{listed}\nBring the damaged files back from a copy, or "
        "start a new run."
    )


def newest_checkpoint(folder: Path) -> Path:
    """The folder of the newest whole one. Raises CheckpointError as choose_checkpoint does."""
    return choose_checkpoint(folder, _read_step).path


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Move the checkpoints after `step`, which a run that goes on from there has left behind, to set-aside/,
    where no resume takes them for its own. Returns where they are now. Raises CheckpointError."""
    moved = []
    try:
        for later in [s for s in checkpoint_steps(folder) if s > step]:
            target, number = folder / SET_ASIDE / f"step-{later}", 1
            while target.exists():
                number += 1
                target = folder / SET_ASIDE / f"step-{later}.{number}"
            target.parent.mkdir(exist_ok=True)
            (folder / f"step-{later}").rename(target)
            moved.append(target)
    except OSError as error:
        raise CheckpointError(f"{folder}: later checkpoints cannot be set aside: {error}") from error
    return moved


def _exactly(folder: Path, read: Callable[[Path], State], step: int, needs: str | None) -> Chosen[State]:
    path = folder / f"step-{step}"
    why = "there is none of that step"
    if step in checkpoint_steps(folder):
        try:
            return Chosen(path, read_whole(path, read, step, needs))
        except CheckpointError as error:
            why = _fault(path, error)
    listed = []
    for other in checkpoint_steps(folder):
        try:
            read_whole(folder / f"step-{other}", read, other, needs)
            listed.append(str(other))
        except CheckpointError as error:
            listed.append(f"{other} (damaged: {_fault(folder / f'step-{other}', error)})")
    raise BadInputError(
        f"step = {step}: {why} in {folder}. Its checkpoints are of the steps: {', '.join(listed) or 'none'}."
    )


def _passed_over(folder: Path, chosen: int, faults: dict[int, str]) -> tuple[str, ...]:
    if not faults:
        return ()
    listed = "; ".join(f"step-{step} is damaged ({fault})" for step, fault in faults.items())
    note = f"{folder}: {listed}. Going on from step-{chosen}, the newest checkpoint that is whole."
    warnings.warn(note, stacklevel=4)
    return (note,)


def _fault(folder: Path, error: CheckpointError) -> str:
    return str(error).removeprefix(f"{folder} is not a complete checkpoint: ")


@dataclass(frozen=True)
class _OnlyStep:
    step: Any


def _read_step(folder: Path) -> _OnlyStep:
    """As much of loop.json as every kind of training has."""
    try:
        return _OnlyStep(read_json(folder / STATE_FILE)["step"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {STATE_FILE}: {error}") from error


def _format_of(folder: Path) -> int:
    """1 for a loop.json that does not say."""
    try:
        values = read_json(folder / STATE_FILE)
    except (OSError, ValueError):
        return FORMAT
    return 1 if isinstance(values, dict) and "format" not in values else FORMAT


def _problem_of_old_format(folder: Path) -> str | None:
    """Without a manifest: every rank's file must be there, and agree with the CRC-32 that it carries."""
    parts = [part for part in (LEARNER, CRITIC) if part == LEARNER or (folder / part).is_dir()]
    for part in parts:
        try:
            layout = read_json(folder / part / "learner.json")
            ranks = layout["world_size"]
            if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
                return f"{part}/learner.json: world_size is {ranks!r}"
        except (OSError, ValueError, TypeError, KeyError) as error:
            return f"there is no learner state in it that can be read ({part}/learner.json: {error})"
        for rank in range(ranks):
            name = f"{part}/rank-{rank}.pt"
            try:
                with zipfile.ZipFile(folder / name) as archive:
                    if archive.testzip() is not None:
                        return f"{name} is damaged (a checksum is another)"
            except (OSError, zipfile.BadZipFile) as error:
                return f"{name} cannot be read: {error}"
    return None


def _of_old_format(folder: Path) -> str:
    return (
        f"{folder} has no {MANIFEST}: it was written by an earlier version. Its {len(files_in(folder))} "
        "files are there and agree with the checksums in them, but nothing proves that they belong together."
    )
