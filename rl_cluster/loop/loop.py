"""The training loop, one for every algorithm and any policy lag: workers behind protocols in, metrics out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_cluster.algorithms.kl_control import kl_controller
from rl_cluster.config.run import RunConfig
from rl_cluster.data.randomness import sample_seeds
from rl_cluster.data.stream import PromptStream
from rl_cluster.loop.bookkeeping import Bookkeeping, Trained
from rl_cluster.loop.buffer import ExperienceBuffer, ReadyGroup
from rl_cluster.loop.evaluation import Evaluator
from rl_cluster.loop.hooks import Hooks
from rl_cluster.loop.ledger import Ledger
from rl_cluster.loop.producer import Producer
from rl_cluster.loop.report import Metrics, StepClock, step_metrics
from rl_cluster.loop.state import Checkpointer, LoopState, seal, write_checkpoint
from rl_cluster.loop.step import TrainStep
from rl_cluster.loop.workers import Turns, Workers, or_failure
from rl_cluster.protocols import Observer
from rl_cluster.rewards.shaping import RunningMoments, ShapedScores, shape_scores
from rl_cluster.trajectory import GroupTask, SamplingSpec

__all__ = ["TrainingLoop", "Turns", "Workers", "train_sampling"]


class TrainingLoop:
    """`run` trains to the last step; the state between steps is exactly what a checkpoint holds."""

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        stream: PromptStream,
        evaluator: Evaluator | None,
        observer: Observer,
        run_folder: Path,
        resume: LoopState | None = None,
        hooks: Sequence[Hooks] = (),
    ) -> None:
        self._hooks = tuple(hooks)
        self._config = config
        self._workers = workers
        self._stream = stream
        self._observer = observer
        self._folder = run_folder
        self._books = Bookkeeping(config, workers, observer, run_folder, self._hooks)
        self._evaluator = evaluator
        self._train_step = TrainStep(config, workers.learner, workers.critic, workers.learner_is_reference)
        self._checkpointer = Checkpointer(
            run_folder / "checkpoints", config.checkpoint.keep_last, config.checkpoint.keep_best
        )
        self._kl = kl_controller(config.algorithm.kl)
        self._moments = RunningMoments()
        self._sampling = train_sampling(config)
        self.step = 0
        self.episode = 0
        self.ledger = Ledger()
        self._last_done = 0.0
        self._reissue: list[int] = []
        if resume is not None:
            self._restore(resume)

    async def run(self) -> Metrics:
        """Publish, evaluate, train to config.run.steps, evaluate. Returns the last evaluation's metrics."""
        last_step = self._config.run.steps
        await self._workers.publisher.publish(self.step)
        for hook in self._hooks:
            hook.on_begin(self.step, last_step, self._folder)
        last_eval = await self._books.evaluate(0, self._evaluator) if self.step == 0 else {}
        buffer = ExperienceBuffer(
            self.ledger,
            groups_per_step=self._config.batch.prompts_per_step,
            max_policy_lag=self._config.asynchrony.max_policy_lag,
            last_version=last_step,
            version=self.step,
            drop_limit=self._config.batch.dynamic_sampling_limit,
        )
        producer = Producer(
            next_task=self._next_task,
            pool=self._workers.pool,
            scoring=self._workers.scoring,
            reference=self._workers.reference,
            buffer=buffer,
            dynamic_sampling=self._config.batch.dynamic_sampling,
        )
        producing = asyncio.create_task(producer.run(), name="producer")
        self._last_done = time.perf_counter()
        try:
            while self.step < last_step and not self._books.wishes.stop:
                last_eval = await self._one_step(buffer, producing) or last_eval
        finally:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)
        for hook in self._hooks:
            hook.on_end(self.step)
        return last_eval

    async def train_on(self, groups: Sequence[ReadyGroup]) -> Metrics:
        """One step on groups that the caller has made and scored, with the published weights of now."""
        self._last_done = time.perf_counter()
        trained = await self._learn(groups, wait=0.0, failing=None)
        self._books.report(self.step, trained.metrics, len(groups))
        return trained.metrics

    @property
    def kl_coef(self) -> float:
        """β of the next step."""
        return self._kl.coef

    def _next_task(self) -> GroupTask:
        group_id = self._reissue.pop(0) if self._reissue else self._stream.take()[0]
        seeds = sample_seeds(self._config.run.seed, group_id, self._config.batch.samples_per_prompt)
        return GroupTask(group_id, self._stream.prompt_at(group_id), seeds, self._sampling)

    async def _one_step(self, buffer: ExperienceBuffer, producing: asyncio.Task[None]) -> Metrics | None:
        start = time.perf_counter()
        self._observer.phase("generating")
        groups = await or_failure(buffer.take_batch(), producing)
        trained = await self._learn(groups, time.perf_counter() - start, producing)
        # Opening the next slots first lets generation overlap with all the bookkeeping below.
        await buffer.trained(groups)
        evaluated = await self._books.after_step(self.step, groups, trained, self.ledger, self._evaluator)
        await self._checkpoint_if_due()
        return evaluated

    async def _learn(
        self, groups: Sequence[ReadyGroup], wait: float, failing: asyncio.Task[None] | None
    ) -> Trained:
        """Update, publish, count. wait: seconds until the groups were there. failing: ends the wait early."""
        taken = time.perf_counter()
        self._observer.phase("training")
        shaped = self._shape(groups)
        kl_coef = self._kl.coef
        update = self._train_step.run(groups, shaped.scores, kl_coef, self.step + 1)
        result = await or_failure(update, failing)
        trained = time.perf_counter()
        self._observer.phase("publishing")
        published = await or_failure(self._workers.publisher.publish(self.step + 1), failing)
        done = time.perf_counter()
        if result.stats.kl is not None:
            self._kl.update(float(result.stats.kl.mean()), len(shaped.raw))
        self.episode += len(shaped.raw)
        self.step += 1
        clock = StepClock(step=done - self._last_done, wait=wait, train=trained - taken, sync=done - trained)
        self._last_done = done
        metrics = step_metrics(groups, shaped, result, clock, published, self.episode, self.step - 1, kl_coef)
        return Trained(shaped, result, metrics)

    def _shape(self, groups: Sequence[ReadyGroup]) -> ShapedScores:
        columns: dict[str, list[np.ndarray]] = {}
        for group in groups:
            for scores in group.scores:
                columns.setdefault(scores.name, []).append(scores.values)
        summaries = [group.summary for group in groups]
        # Scores that the caller brought come from no scorer, and count as they are.
        weights = {name: self._workers.scoring.weights.get(name, 1.0) for name in columns}
        shaped = shape_scores(
            {name: np.concatenate(values) for name, values in columns.items()},
            weights,
            action_counts=[count for s in summaries for count in s.action_counts],
            ended_with_eos=[flag for s in summaries for flag in s.ended_with_eos],
            max_new_tokens=self._config.rollout.max_new_tokens,
            shaping=self._config.rewards.shaping,
            moments=self._moments,
        )
        self._moments = shaped.moments
        return shaped

    async def _checkpoint_if_due(self) -> None:
        every = self._config.checkpoint.every
        last = self.step == self._config.run.steps or self._books.wishes.stop
        if self._books.wishes.save or (every and (last or self.step % every == 0)):
            await self.save()

    async def save(self, folder: Path | None = None) -> Path:
        """A checkpoint of now; folder None: checkpoints/step-N, where the retention rule holds."""
        state, workers = self.state(), self._workers
        self._observer.phase("saving")
        if folder is None:
            path = await self._checkpointer.write(state, workers.learner, workers.critic)
        else:
            path = await write_checkpoint(folder, state, workers.learner, workers.critic)
        for hook in self._hooks:
            hook.on_save(self.step, path)
        if folder is None:
            self._checkpointer.finish(self.step, state.scores)
        else:
            seal(path)
        return path

    def state(self) -> LoopState:
        """What a run needs, beside the learner's weights, to go on as if it had never stopped."""
        return LoopState(
            step=self.step,
            episode=self.episode,
            ledger=self.ledger.to_json(),
            stream=self._stream.state(),
            reissue=tuple(sorted(set(self.ledger.unfinished()) | set(self._reissue))),
            kl=self._kl.state(),
            shaping=self._moments.state(),
            scores=dict(self._books.eval_scores),
        )

    def _restore(self, state: LoopState) -> None:
        self.step, self.episode = state.step, state.episode
        self.ledger = Ledger.from_json(state.ledger)
        self._stream.load_state(state.stream)
        self._reissue = list(state.reissue)
        self._kl.load(state.kl)
        self._moments = RunningMoments.from_state(state.shaping)
        self._books.eval_scores = dict(state.scores)


def train_sampling(config: RunConfig) -> SamplingSpec:
    """The rollout section."""
    rollout = config.rollout
    return SamplingSpec(
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
    )
