"""What a run records of a step beside training: samples, trajectories, evaluations, health, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from rl_cluster.config.run import RunConfig
from rl_cluster.errors import HealthError
from rl_cluster.loop.buffer import ReadyGroup
from rl_cluster.loop.evaluation import Evaluator
from rl_cluster.loop.experience import sample_texts
from rl_cluster.loop.health import HealthMonitor
from rl_cluster.loop.hooks import Hooks, Wishes, all_wishes
from rl_cluster.loop.ledger import Ledger
from rl_cluster.loop.report import Metrics
from rl_cluster.loop.step import StepResult
from rl_cluster.loop.trajectories import write_trajectories
from rl_cluster.loop.workers import Workers, or_failure
from rl_cluster.protocols import Observer, SampleRow
from rl_cluster.rewards.shaping import ShapedScores

ALARMS = "alarms.jsonl"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """What was learned, before any engine has it. wait, train: seconds."""

    shaped: ShapedScores
    result: StepResult
    kl_coef: float
    wait: float
    train: float


@dataclass(frozen=True)
class Trained:
    """One step's outcome. metrics: grows until it is reported."""

    shaped: ShapedScores
    result: StepResult
    metrics: Metrics


class Bookkeeping:
    """`after_step` reports a step. wishes: what the hooks asked for since then. eval_scores: step ->
    eval/score_mean, for the retention rule."""

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        observer: Observer,
        run_folder: Path,
        hooks: Sequence[Hooks],
    ) -> None:
        self._config = config
        self._workers = workers
        self._observer = observer
        self._folder = run_folder
        self._hooks = hooks
        self._monitor = HealthMonitor(config)
        self.wishes = Wishes()
        self.eval_scores: dict[str, float] = {}

    def tell_hooks(self, step: int, metrics: Metrics) -> None:
        """Of an update; what they wish for stands in `wishes`."""
        self.wishes = all_wishes([hook.on_step(step, metrics) for hook in self._hooks])

    def saved(self) -> None:
        """Nobody wishes for a checkpoint any more."""
        self.wishes = replace(self.wishes, save=False)

    def owes_evaluation(self, step: int, evaluator: Evaluator | None) -> bool:
        """Before the first step, and where a checkpoint is older than the evaluation of its step."""
        return evaluator is not None and self._is_evaluation_due(step) and str(step) not in self.eval_scores

    def _is_evaluation_due(self, step: int) -> bool:
        every = self._config.eval.every
        return step in (0, self._config.run.steps) or (every > 0 and step % every == 0)

    async def record(self, step: int, groups: Sequence[ReadyGroup], trained: Trained) -> None:
        """The samples and trajectories that are due; before the checkpoint, so that it lacks none of them."""
        log = self._config.log
        last = step == self._config.run.steps
        if log.samples_every and (step % log.samples_every == 0 or last):
            await self._show_samples(step, groups, trained.shaped.raw)
        if log.trajectories:
            await self._write_trajectories(step, groups, trained)

    def row(self, metrics: Metrics, ledger: Ledger) -> Metrics:
        """metrics, and what is counted beside the step's own."""
        failures = {f"failures/{kind}": float(n) for kind, n in self._workers.scoring.failures.counts.items()}
        return metrics | failures | {f"ledger/{state}": float(n) for state, n in ledger.counts().items()}

    async def after_step(
        self,
        step: int,
        trained: Trained,
        ledger: Ledger,
        evaluator: Evaluator | None,
        failing: asyncio.Task[None] | None = None,
    ) -> Metrics | None:
        """Evaluate where it is due, and report the step; returns the evaluation's metrics if there was one,
        which ends early when `failing` does."""
        metrics = trained.metrics
        evaluated = None
        try:
            if self._is_evaluation_due(step) or self.wishes.evaluate:
                evaluated = await or_failure(self.evaluate(step, evaluator), failing)
                metrics |= evaluated
            if self._workers.health is not None:
                metrics |= await self._workers.health()
        except BaseException:
            self._observer.metrics(step, metrics)  # what was measured is not lost with what failed
            raise
        self._observer.metrics(step, self.row(metrics, ledger))
        return evaluated

    def report(self, step: int, metrics: Metrics, num_groups: int) -> None:
        """Tell the observer, and the user of every alarm. Raises HealthError where one must end the run."""
        self.examine(step, metrics, num_groups)
        self._observer.metrics(step, metrics)

    def examine(self, step: int, metrics: Metrics, num_groups: int) -> None:
        """Tell the user of every alarm. Raises HealthError where one must end the run, after the metrics are
        with the observer: what comes of such a step is not worth a checkpoint."""
        alarms = self._monitor.check(step, metrics, num_groups)
        metrics["health/alarms"] = float(len(alarms))
        for alarm in alarms:
            _LOG.warning("warning: %s", alarm.message)
        if alarms:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / ALARMS).open("a") as file:
                file.writelines(json.dumps({"step": step, **asdict(alarm)}) + "\n" for alarm in alarms)
        fatal = [alarm.message for alarm in alarms if alarm.fatal]
        if fatal:
            self._observer.metrics(step, metrics)
            raise HealthError("; ".join(fatal))

    async def evaluate(self, step: int, evaluator: Evaluator | None) -> Metrics:
        """{} without held-out prompts. The one before the first step is a row of its own."""
        if evaluator is None:
            return {}
        self._observer.phase("evaluating")
        metrics = (await evaluator.run()).metrics
        if step == 0:
            self._observer.metrics(0, metrics)
        score = metrics["eval/score_mean"]
        assert score is not None
        self.eval_scores[str(step)] = score
        for hook in self._hooks:
            self.wishes |= hook.on_evaluate(step, metrics)
        return metrics

    async def _show_samples(self, step: int, groups: Sequence[ReadyGroup], raw: np.ndarray) -> None:
        chosen = groups[: self._config.log.num_samples]
        samples = self._config.batch.samples_per_prompt
        texts = await self._workers.learner.ask(sample_texts, *(group.group for group in chosen))
        rows = [SampleRow(t.prompt, t.response, float(raw[i * samples])) for i, t in enumerate(texts)]
        self._observer.samples(step, rows)

    async def _write_trajectories(self, step: int, groups: Sequence[ReadyGroup], trained: Trained) -> None:
        path = self._folder / "trajectories" / f"step-{step}.parquet"
        refs = [group.group for group in groups]
        await self._workers.learner.ask(
            write_trajectories, str(path), trained.shaped.scores, trained.result.batch, *refs
        )
