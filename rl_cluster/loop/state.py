"""What the loop itself remembers between steps, and its checkpoints: a folder step-N, complete or absent."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rl_cluster.errors import CheckpointError
from rl_cluster.protocols import Learner
from rl_cluster.run_folder import folder_atomically

STATE_FILE = "loop.json"


@dataclass(frozen=True)
class LoopState:
    """step: batches trained, which is also the policy version. reissue: groups that were begun and not
    trained. scores: step -> eval/score_mean. The rest are the states of the loop's parts, as JSON."""

    step: int
    episode: int
    ledger: dict[str, Any]
    stream: dict[str, Any]
    reissue: tuple[int, ...]
    kl: dict[str, Any]
    shaping: dict[str, Any]
    scores: dict[str, float]

    @staticmethod
    def read(folder: Path) -> LoopState:
        """Raises CheckpointError when the folder is not a complete checkpoint."""
        try:
            values = json.loads((folder / STATE_FILE).read_text())
            return LoopState(**{**values, "reissue": tuple(values["reissue"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{folder} is not a complete checkpoint: {error}") from error


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

    async def save(self, state: Snapshot, learner: Learner, critic: Learner | None) -> Path:
        """Raises CheckpointError (for example on a full disk); earlier checkpoints are untouched then."""
        target = await write_checkpoint(self._folder / f"step-{state.step}", state, learner, critic)
        self._forget(state)
        return target

    def _forget(self, state: Snapshot) -> None:
        steps = sorted(checkpoint_steps(self._folder))
        kept = set(steps[-self._keep_last :])
        if self._keep_best:
            scored = [(state.scores[str(s)], -s) for s in steps if str(s) in state.scores]
            if scored:
                kept.add(-max(scored)[1])
        for step in steps:
            if step not in kept:
                shutil.rmtree(self._folder / f"step-{step}")


async def write_checkpoint(target: Path, state: Snapshot, learner: Learner, critic: Learner | None) -> Path:
    """Complete or absent: temporary name, then rename."""
    with folder_atomically(target, "checkpoint") as partial:
        await learner.save(partial / "learner")
        if critic is not None:
            await critic.save(partial / "critic")
        (partial / STATE_FILE).write_text(json.dumps(asdict(state)))
    return target


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, in no order."""
    names = [path.name for path in folder.glob("step-*") if (path / STATE_FILE).is_file()]
    return [int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit()]


def newest_checkpoint(folder: Path) -> Path:
    """Raises CheckpointError when there is none."""
    steps = checkpoint_steps(folder)
    if not steps:
        raise CheckpointError(f"no checkpoint in {folder}; was checkpoint.every set in the first run?")
    return folder / f"step-{max(steps)}"
