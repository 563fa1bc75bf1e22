"""When a loop writes checkpoints, in which order with hooks and evaluations, and on its way out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl_cluster.config.run import CheckpointConfig
from rl_cluster.errors import HealthError
from rl_cluster.files.json_lines import row_text
from rl_cluster.loop.checkpoints import step_of
from rl_cluster.loop.hooks import Hooks
from rl_cluster.loop.state import Checkpointer, Snapshot
from rl_cluster.protocols import Learner, Observer

_LOG = logging.getLogger(__name__)


class Saving:
    """A checkpoint is written before the evaluation of its step, which may fail, and finished after it: then
    it gets the score, the hooks hear of it, and old ones are deleted."""

    def __init__(
        self,
        config: CheckpointConfig,
        run_folder: Path,
        hooks: Sequence[Hooks],
        observer: Observer,
        learner: Learner,
        critic: Learner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._checkpointer = Checkpointer(run_folder / "checkpoints", config.keep_last, config.keep_best)
        self._hooks = hooks
        self._observer = observer
        self._learners = learner, critic
        self._clock = clock
        self._last_time = clock()
        self._last_step: int | None = None
        self._unfinished: tuple[int, Path] | None = None
        self._owed = False
        self._row: tuple[int, str] | None = None

    def note_row(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """What metrics.jsonl will say of the step: the checkpoint carries it, should the run die before."""
        self._row = step, row_text(step, metrics)

    def is_due(self, step: int, ends: bool, is_sound: bool) -> bool:
        """ends: no step follows. is_sound: the last update was made; a due checkpoint waits for one."""
        if self._last_step == step:
            return False
        every, minutes = self._config.every, self._config.minutes
        by_steps = every > 0 and step % every == 0
        by_time = minutes > 0 and self._clock() - self._last_time >= 60.0 * minutes
        self._owed |= by_steps or by_time or (ends and (every > 0 or minutes > 0))
        return self._owed and is_sound

    async def write(self, state: Snapshot) -> Path:
        """checkpoints/step-N. Raises CheckpointError."""
        self._observer.phase("saving")
        row = self._row[1] if self._row is not None and self._row[0] == state.step else None
        path = await self._checkpointer.write(state, *self._learners, row=row)
        self._unfinished = state.step, path
        self._last_step, self._last_time, self._owed = state.step, self._clock(), False
        return path

    def finish(self, scores: Mapping[str, float]) -> None:
        """Nothing, where none was written since the last time."""
        if self._unfinished is None:
            return
        (step, path), self._unfinished = self._unfinished, None
        wanted = [hook.on_save(step, path) for hook in self._hooks]
        self._checkpointer.finish(step, scores, {step_of(kept.name) for kept in wanted if kept is not None})

    async def on_the_way_out(
        self, error: BaseException, state: Callable[[], Snapshot | None], asked: bool
    ) -> None:
        """A last checkpoint, where the state is whole and none is there of it; never raises for its own sake.

        state: None where it is not whole. asked: to stop; whoever cancels after that has no patience.
        """
        wanted = self._config.every > 0 or self._config.minutes > 0
        hasty = isinstance(error, asyncio.CancelledError) and asked
        snapshot = None if hasty or not wanted or isinstance(error, HealthError) else state()
        if snapshot is None or snapshot.step in (0, self._last_step):
            return
        try:
            await asyncio.wait_for(self.write(snapshot), self._config.exit_seconds)
            self.finish(snapshot.scores)
        except Exception as problem:  # noqa: BLE001 — the error that ends the run is what the user must see
            _LOG.warning("no checkpoint could be written at the end: %s", problem)
        else:
            _LOG.warning("a checkpoint of step %d was written", snapshot.step)
