"""The loop of training on fixed data, one for every objective: a Learner and FitSets in, metrics out."""

from __future__ import annotations

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
from rl_cluster.loop.state import STRICT, Checkpointer, read_state
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
    ) -> None:
        self._config = config
        self._learner = learner
        self._sets = sets
        self._observer = observer
        self._folder = run_folder
        self._hooks = tuple(hooks)
        self._checkpointer = Checkpointer(
            run_folder / "checkpoints", config.checkpoint.keep_last, config.checkpoint.keep_best
        )
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
        last: Metrics = {}
        if self.step == 0 and self._config.eval.at_start and self._sets.evaluation is not None:
            last, _ = await self._evaluate()
            self._observer.metrics(0, last)
        stop = False
        while self.step < self.last_step and not stop:
            stop, evaluated = await self._one_step()
            last = evaluated or last
        for hook in self._hooks:
            hook.on_end(self.step)
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
        return self._order[1][chosen.start : chosen.stop].tolist()

    async def _one_step(self) -> tuple[bool, Metrics]:
        start = time.perf_counter()
        self._observer.phase("training")
        rows = self._sets.train.select(self.examples_of(self.step))
        metrics = await self._update(rows)
        self.step += 1
        seconds = time.perf_counter() - start
        metrics["epoch"] = self.step / self._per_epoch
        metrics["perf/step_seconds"] = seconds
        metrics["perf/trained_tokens_per_second"] = len(rows.batch.tokens) / seconds
        wishes = all_wishes(hook.on_step(self.step, metrics) for hook in self._hooks)
        evaluated: Metrics = {}
        if self._sets.evaluation is not None and self._evaluation_is_due(wishes):
            evaluated, more = await self._evaluate()
            wishes |= more
        self._observer.metrics(self.step, metrics | evaluated)
        if self._checkpoint_is_due(wishes):
            await self._save()
        return wishes.stop, evaluated

    async def _update(self, rows: FitRows) -> Metrics:
        z0 = await kl_baseline(self._learner, rows)
        batch = rows.batch
        totals = await self._learner.forward_backward(
            batch, BatchLayout.of(batch), range(batch.num_rows), fit_step(self._config.objective, z0)
        )
        result = await self._learner.optim_step()
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

    def _checkpoint_is_due(self, wishes: Wishes) -> bool:
        every = self._config.checkpoint.every
        ends = wishes.stop or self.step == self.last_step
        return wishes.save or (every > 0 and (ends or self.step % every == 0))

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

    async def _save(self) -> None:
        self._observer.phase("saving")
        state = FitState(self.step, self._fingerprint, dict(self._scores))
        folder = await self._checkpointer.write(state, self._learner, None)
        for hook in self._hooks:
            hook.on_save(self.step, folder)
        self._checkpointer.finish(self.step, state.scores)

    def _restore(self, state: FitState) -> None:
        check_same_rows(state, self._sets)
        self.step = state.step
        self._scores = dict(state.scores)
