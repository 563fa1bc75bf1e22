"""What the loop itself remembers between steps, and its checkpoints: a folder step-N, complete or absent."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
    with_config,
)
from typing_extensions import TypedDict

from rl_cluster.errors import CheckpointError
from rl_cluster.files.atomic import folder_atomically, write_atomically
from rl_cluster.files.json_lines import ROW_FILE
from rl_cluster.files.manifest import describe, extend_manifest, read_json, signature, write_manifest
from rl_cluster.files.own_folders import note_files
from rl_cluster.loop.checkpoints import CRITIC, FORMAT, LEARNER, STATE_FILE, checkpoint_steps, problem_of
from rl_cluster.loop.checkpoints import newest_checkpoint as newest_checkpoint
from rl_cluster.protocols import Learner

SCORES_FILE = "scores.json"
"""Beside loop.json: the scores with that of the evaluation which came after the checkpoint."""
TRAINER_FILE = "trainer_state.json"
"""Of the library's hooks, as transformers' Trainer has it; written when they are told of the save."""

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

GroupId = Annotated[str, Field(pattern="^[0-9]{1,18}$")]


@with_config(OPEN)
class _Stream(TypedDict):
    """Of data.stream.PromptStream, which compares the rest with its own."""

    position: NonNegativeInt


@with_config(OPEN)
class _KL(TypedDict):
    """Of algorithms.kl_control."""

    coef: float


@with_config(STRICT)
class _Moments(TypedDict):
    """Of rewards.shaping.RunningMoments."""

    count: NonNegativeInt
    mean: float
    squared_deviations: NonNegativeFloat


def _of(kind: Any) -> AfterValidator:
    def check(values: dict[str, Any]) -> dict[str, Any]:
        try:
            TypeAdapter(kind).validate_python(values)
        except ValidationError as error:
            raise ValueError(describe(error)) from None
        return values

    return AfterValidator(check)


@dataclass(frozen=True)
class LoopState:
    """step: batches trained, which is also the policy version. reissue: groups that were begun and not
    trained. scores: step -> eval/score_mean. The rest are the states of the loop's parts, as JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    step: NonNegativeInt
    episode: NonNegativeInt
    ledger: dict[GroupId, tuple[str, int, str | None]]
    stream: Annotated[dict[str, Any], _of(_Stream)]
    reissue: tuple[NonNegativeInt, ...]
    kl: Annotated[dict[str, Any], _of(_KL)]
    shaping: Annotated[dict[str, Any], _of(_Moments)]
    scores: dict[str, float]

    @staticmethod
    def read(folder: Path) -> LoopState:
        """Raises CheckpointError when loop.json is missing, or anything in it is not what it should be."""
        return read_state(folder, LoopState)


S = TypeVar("S")


def read_state(folder: Path, kind: type[S]) -> S:
    """The loop.json of a checkpoint as a `kind`, every field of its type. Raises CheckpointError."""
    try:
        values = read_json(folder / STATE_FILE)
        if not isinstance(values, dict):
            raise ValueError(f"{STATE_FILE} is {type(values).__name__}, not an object")
        written = values.pop("format", 1)
        if written not in (1, FORMAT) or isinstance(written, bool):
            raise ValueError(f"{STATE_FILE}: format is {written!r}; this version reads up to {FORMAT}")
        if (folder / SCORES_FILE).is_file():
            values["scores"] = read_json(folder / SCORES_FILE)
        return TypeAdapter(kind).validate_json(json.dumps(values))
    except ValidationError as error:
        cause = f"{STATE_FILE}: {describe(error)}"
    except (OSError, ValueError, RecursionError) as error:
        cause = str(error)
    raise CheckpointError(f"{folder} is not a complete checkpoint: {cause}")


class Snapshot(Protocol):
    """The state of a loop as Checkpointer needs it; a dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def step(self) -> int: ...

    @property
    def scores(self) -> dict[str, float]: ...


class Checkpointer:
    """Writes to a temporary name, renames, then deletes what the retention rule no longer keeps."""

    def __init__(self, folder: Path, keep_last: int, keep_best: bool) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._proven: dict[int, tuple[Any, bool]] = {}

    async def write(
        self, state: Snapshot, learner: Learner, critic: Learner | None, row: str | None = None
    ) -> Path:
        """row: the step's line of metrics.jsonl. Raises CheckpointError (for example on a full disk); earlier
        checkpoints are untouched then."""
        target = await write_checkpoint(self._folder / f"step-{state.step}", state, learner, critic, row)
        self._proven[state.step] = signature(target), True
        return target

    def finish(
        self, step: int, scores: Mapping[str, float], wanted: Collection[int | None] = frozenset()
    ) -> None:
        """After the evaluation of a step whose checkpoint is written: add its score, and whatever else has
        been put into the folder, to the checkpoint; then delete what is no longer kept, nor of `wanted`."""
        folder = self._folder / f"step-{step}"
        if self._is_whole(step):
            seal(folder, scores)
            self._proven[step] = signature(folder), True
        self._forget(scores, wanted)

    def _forget(self, scores: Mapping[str, float], wanted: Collection[int | None]) -> None:
        """Only whole ones count as kept, so a damaged one never costs a good one its place."""
        steps = checkpoint_steps(self._folder)
        kept: set[int] = set()
        for step in reversed(steps):
            if len(kept) < self._keep_last and self._is_whole(step):
                kept.add(step)
        if len(kept) < self._keep_last:
            return
        oldest = min(kept)
        if self._keep_best:
            ranked = sorted((s for s in steps if str(s) in scores), key=lambda s: (-scores[str(s)], s))
            kept |= set([s for s in ranked if self._is_whole(s)][:1])
        for step in steps:
            if step < oldest and step not in kept and step not in wanted:
                shutil.rmtree(self._folder / f"step-{step}")

    def _is_whole(self, step: int) -> bool:
        """Every file is read once, and again when one was written."""
        folder = self._folder / f"step-{step}"
        found = signature(folder)
        known = self._proven.get(step)
        if known is None or known[0] != found:
            known = self._proven[step] = found, problem_of(folder) is None
        return known[1]


async def write_checkpoint(
    target: Path, state: Snapshot, learner: Learner, critic: Learner | None, row: str | None = None
) -> Path:
    """Complete or absent: temporary name, the manifest of all files last, then rename."""
    with folder_atomically(target, "checkpoint") as partial:
        await learner.save(partial / LEARNER)
        if critic is not None:
            await critic.save(partial / CRITIC)
        (partial / STATE_FILE).write_text(json.dumps({"format": FORMAT, **asdict(state)}))
        if row is not None:
            (partial / ROW_FILE).write_text(row + "\n")
        with ThreadPoolExecutor(1) as hashing:  # while it hashes, groups are still handed out
            await asyncio.get_running_loop().run_in_executor(hashing, write_manifest, partial)
    return target


def seal(folder: Path, scores: Mapping[str, float] | None = None) -> None:
    """Take into the manifest what was added to a checkpoint since it was written: the newest scores, and the
    state of the library's hooks. Raises CheckpointError."""
    try:
        if scores is not None:
            write_atomically(folder / SCORES_FILE, json.dumps(dict(scores)))
        added = [name for name in (SCORES_FILE, TRAINER_FILE) if (folder / name).is_file()]
        note_files(folder, added)
        extend_manifest(folder, added)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} could not be completed: {error}; it is as it was before") from error
