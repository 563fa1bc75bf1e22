"""The loop of training on fixed data, one for every objective: a Learner and FitSets in, metrics out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict, NonNegativeInt

from rl_cluster.algorithms.fit_table import fit_step
from rl_cluster.config.fit import FitConfig
from rl_cluster.data.pairs import FitRows, FitSets
from rl_cluster.data.randomness import permutation
from rl_cluster.errors import BadInputError
from rl_cluster.loop.fit_pass import evaluate, kl_baseline
from rl_cluster.loop.fit_report import Metrics, fit_metrics
from rl_cluster.loop.hooks import Hooks, Wishes, all_wishes
from rl_cluster.loop.saving import Saving
from rl_cluster.loop.skipped import SkippedUpdates
from rl_cluster.loop.state import STRICT, read_state
from rl_cluster.loop.stopping import StopRequest, stoppable
from rl_cluster.loop.workers import or_failure
from rl_cluster.protocols import BatchLayout, Learner, Observer


@dataclass(frozen=True)
class FitState:
    """What the loop remembers between steps: the place in the data follows from the step and the seed.

    scores: step -> minus the held-out loss, for the retention rule.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    step: NonNegativeInt
    fingerprint: str
    scores: dict[str, float]

    @staticmethod
    def read(folder: Path) -> FitState:
        """Raises CheckpointError when loop.json is missing, or anything in it is not what it should be."""
        return read_state(folder, FitState)


def total_steps(config: FitConfig, num_examples: int) -> int:
    """run.steps, or as many as the epochs take."""
    return config.run.steps or config.run.epochs * steps_per_epoch(config, num_examples)


def steps_per_epoch(config: FitConfig, num_examples: int) -> int:
    """The last batch of an epoch takes what is left."""
    return math.ceil(num_examples / config.batch.rows_per_step)


def warmup_steps(config: FitConfig, num_steps: int) -> int:
    """optimizer.warmup_steps, or warmup_ratio of the steps, rounded up."""
    return config.optimizer.warmup_steps or math.ceil(config.warmup_ratio * num_steps)


def check_same_rows(state: FitState, sets: FitSets) -> None:
    """Raise BadInputError where the data are not those that the checkpoint was trained on."""
    if state.fingerprint != sets.train.fingerprint:
        raise BadInputError(
            "resume: data.path: the training rows are not those of the checkpoint. Resume with the data, "
            "tokenizer and lengths of the first start; a file may lie elsewhere, its rows may not change."
        )


class FitLoop:
    """`run` trains to the last step. sets: with the reference attached where the objective compares with one.

    The learner must be at the weights of `resume`, or at those to start from.
    """

    def __init__(
        self,
        config: FitConfig,
        learner: Learner,
        sets: FitSets,
        observer: Observer,
        run_folder: Path,
        resume: FitState | None = None,
        hooks: Sequence[Hooks] = (),
        stop: StopRequest | None = None,
    ) -> None:
        """stop: heeded between two updates; `run` then raises StopAskedError."""
        self._config = config
        self._learner = learner
        self._sets = sets
        self._observer = observer
        self._folder = run_folder
        self._hooks = tuple(hooks)
        self._stop = stop or StopRequest()
        self._saving = Saving(config.checkpoint, run_folder, self._hooks, observer, learner)
        self._skipped = SkippedUpdates(config.health.max_skipped_updates)
        self._is_whole = True
        self._per_epoch = steps_per_epoch(config, sets.train.num_examples)
        self._fingerprint = sets.train.fingerprint
        self.last_step = total_steps(config, sets.train.num_examples)
        self.step = 0
        self._scores: dict[str, float] = {}
        self._order: tuple[int, np.ndarray] | None = None
        if resume is not None:
            self._restore(resume)

    async def run(self) -> Metrics:
        """Evaluate, train, evaluate. Returns the last evaluation's metrics ({} without held-out rows)."""
        for hook in self._hooks:
            hook.on_begin(self.step, self.last_step, self._folder)
        try:
            last = await self._run()
        except BaseException as error:
            await self._saving.on_the_way_out(error, self._whole_state, self._stop.asked)
            raise
        self._skipped.check_end()
        for hook in self._hooks:
            hook.on_end(self.step)
        return last

    async def _run(self) -> Metrics:
        """What is waited for, other than an update, ends early when somebody asks to stop."""
        main = asyncio.current_task()
        assert main is not None
        last: Metrics = {}
        async with stoppable(None, self._stop, self._config.checkpoint.exit_seconds, main) as failing:
            if self._owes_evaluation():
                last, _ = await or_failure(self._evaluate(), failing)
                self._observer.metrics(self.step, last)
            stop = False
            while self.step < self.last_step and not stop:
                stop, evaluated = await self._one_step(failing)
                last = evaluated or last
        return last

    def examples_of(self, step: int) -> list[int]:
        """The examples of a step, counted from 0: a new order in every epoch, from the seed alone."""
        epoch, place = divmod(step, self._per_epoch)
        size, count = self._config.batch.rows_per_step, self._sets.train.num_examples
        chosen = range(place * size, min((place + 1) * size, count))
        if not self._config.data.shuffle:
            return list(chosen)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, permutation(count, "fit epoch", self._config.run.seed, epoch)
        result: list[int] = self._order[1][chosen.start : chosen.stop].tolist()
        return result

    async def _one_step(self, failing: asyncio.Task[None]) -> tuple[bool, Metrics]:
        # In one process an update never lets anybody else have a turn.
        await or_failure(asyncio.sleep(0), failing)
        start = time.perf_counter()
        self._observer.phase("training")
        self._is_whole = False
        rows = self._sets.train.select(self.examples_of(self.step))
        metrics = await self._update(rows)
        self.step += 1
        seconds = time.perf_counter() - start
        metrics["epoch"] = self.step / self._per_epoch
        metrics["perf/step_seconds"] = seconds
        metrics["perf/trained_tokens_per_second"] = len(rows.batch.tokens) / seconds
        wishes = all_wishes(hook.on_step(self.step, metrics) for hook in self._hooks)
        self._is_whole = True
        self._saving.note_row(self.step, metrics)
        evaluated: Metrics = {}
        try:
            ends = wishes.stop or self.step == self.last_step
            saved = await self._save_if(self._saving.is_due(self.step, ends, self._is_sound()) or wishes.save)
            if self._sets.evaluation is not None and self._evaluation_is_due(wishes):
                evaluated, more = await or_failure(self._evaluate(), failing)
                wishes |= more
                await self._save_if(more.save and not saved)
        finally:
            self._observer.metrics(self.step, metrics | evaluated)
            self._saving.finish(self._scores)
        return wishes.stop, evaluated

    def _is_sound(self) -> bool:
        return not self._skipped.last_was_skipped

    async def _save_if(self, wanted: bool) -> bool:
        """After a skipped update nothing is worth saving."""
        if wanted and self._is_sound():
            await self._saving.write(self._state())
            return True
        return False

    def _state(self) -> FitState:
        return FitState(self.step, self._fingerprint, dict(self._scores))

    def _whole_state(self) -> FitState | None:
        return self._state() if self._is_whole and self._is_sound() else None

    async def _update(self, rows: FitRows) -> Metrics:
        z0 = await kl_baseline(self._learner, rows)
        batch = rows.batch
        totals, _ = await self._learner.forward_backward(
            batch, BatchLayout.of(batch), range(batch.num_rows), fit_step(self._config.objective, z0)
        )
        result = await self._learner.optim_step()
        self._skipped.count([result], totals)
        return {
            **fit_metrics(totals, "train"),
            **({"train/kl_baseline": z0} if rows.mismatched is not None else {}),
            "lr": result.learning_rate,
            "optim/grad_norm": result.grad_norm,
            "optim/skipped_updates": float(result.skipped),
        }

    def _evaluation_is_due(self, wishes: Wishes) -> bool:
        every = self._config.eval.every
        ends = wishes.stop or self.step == self.last_step
        return ends or wishes.evaluate or (every > 0 and self.step % every == 0)

    def _owes_evaluation(self) -> bool:
        """Before the first step, and where a checkpoint is older than the evaluation of its step."""
        if self._sets.evaluation is None or str(self.step) in self._scores:
            return False
        return self._config.eval.at_start if self.step == 0 else self._evaluation_is_due(Wishes())

    async def _evaluate(self) -> tuple[Metrics, Wishes]:
        rows = self._sets.evaluation
        assert rows is not None
        self._observer.phase("evaluating")
        z0 = await kl_baseline(self._learner, rows)
        totals = await evaluate(self._learner, rows, fit_step(self._config.objective, z0))
        metrics = fit_metrics(totals, "eval")
        loss = metrics["eval/loss"]
        assert loss is not None
        self._scores[str(self.step)] = -loss
        return metrics, all_wishes(hook.on_evaluate(self.step, metrics) for hook in self._hooks)

    def _restore(self, state: FitState) -> None:
        check_same_rows(state, self._sets)
        self.step = state.step
        self._scores = dict(state.scores)
