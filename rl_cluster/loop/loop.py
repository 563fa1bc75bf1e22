"""The training loop, one for every algorithm and any policy lag: workers behind protocols in, metrics out.

Who waits for whom:

    producer ──waits for a free slot──▶ buffer ◀──waits for groups_per_step ready groups── loop
       │  rollout worker ▶ scorers, reference                                              │ update
       └──── ready group ───────────────▶ buffer ◀──version + 1 opens the next slots── publish ▶ engines
                                                                                           │
                             evaluation, trajectories, checkpoint, while the next groups are drawn
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_cluster.algorithms.kl_control import kl_controller
from rl_cluster.config.run import RunConfig
from rl_cluster.data.randomness import sample_seeds
from rl_cluster.data.stream import PromptStream
from rl_cluster.errors import HealthError
from rl_cluster.loop.bookkeeping import Bookkeeping, Trained, Update
from rl_cluster.loop.buffer import ExperienceBuffer, ReadyGroup
from rl_cluster.loop.evaluation import Evaluator
from rl_cluster.loop.hooks import Hooks
from rl_cluster.loop.ledger import GroupState, Ledger
from rl_cluster.loop.producer import Producer
from rl_cluster.loop.report import Metrics, StepClock, step_metrics
from rl_cluster.loop.saving import Saving
from rl_cluster.loop.shaped import shape_groups
from rl_cluster.loop.skipped import SkippedUpdates
from rl_cluster.loop.state import LoopState, seal, write_checkpoint
from rl_cluster.loop.step import TrainStep
from rl_cluster.loop.stopping import StopRequest, stoppable
from rl_cluster.loop.workers import Turns, Workers, or_failure
from rl_cluster.protocols import Observer, PublishReport
from rl_cluster.rewards.shaping import RunningMoments, ShapedScores
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
        stop: StopRequest | None = None,
    ) -> None:
        """stop: heeded between two updates; `run` then raises StopAskedError."""
        self._hooks = tuple(hooks)
        self._stop = stop or StopRequest()
        self._is_whole = True
        self._config = config
        self._workers = workers
        self._stream = stream
        self._observer = observer
        self._folder = run_folder
        self._books = Bookkeeping(config, workers, observer, run_folder, self._hooks)
        self._evaluator = evaluator
        self._train_step = TrainStep(config, workers.learner, workers.critic, workers.learner_is_reference)
        self._saving = Saving(
            config.checkpoint, run_folder, self._hooks, observer, workers.learner, workers.critic
        )
        self._skipped = SkippedUpdates(config.health.max_skipped_updates)
        self._critic_skipped = SkippedUpdates(config.health.max_skipped_updates, "the critic's update")
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
        try:
            last_eval = await self._run(buffer, producer, last_step)
        except BaseException as error:
            await self._saving.on_the_way_out(error, self._whole_state, self._stop.asked)
            raise
        self._skipped.check_end()
        self._critic_skipped.check_end()
        for hook in self._hooks:
            hook.on_end(self.step)
        return last_eval

    async def _run(self, buffer: ExperienceBuffer, producer: Producer, last_step: int) -> Metrics:
        """The steps. What is waited for, other than an update, ends early when the producer fails or somebody
        asks to stop; an update then still has checkpoint.exit_seconds."""
        main = asyncio.current_task()
        assert main is not None
        last_eval: Metrics = {}
        if self._books.owes_evaluation(self.step, self._evaluator):
            async with stoppable(None, self._stop, self._config.checkpoint.exit_seconds, main) as failing:
                last_eval = await or_failure(self._books.evaluate(self.step, self._evaluator), failing)
            if self.step > 0:
                self._observer.metrics(self.step, dict(last_eval))
        producing = asyncio.create_task(producer.run(), name="producer")
        self._last_done = time.perf_counter()
        try:
            seconds = self._config.checkpoint.exit_seconds
            async with stoppable(producing, self._stop, seconds, main) as failing:
                while self.step < last_step and not self._books.wishes.stop:
                    last_eval = await self._one_step(buffer, producing, failing) or last_eval
        finally:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)
        return last_eval

    async def train_on(self, groups: Sequence[ReadyGroup]) -> Metrics:
        """One step on groups that the caller has made and scored, with the published weights of now."""
        self._last_done = time.perf_counter()
        update = await self._update(groups, wait=0.0, failing=None)
        trained = await self._publish(groups, update, failing=None)
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

    async def _one_step(
        self, buffer: ExperienceBuffer, producing: asyncio.Task[None], failing: asyncio.Task[None]
    ) -> Metrics | None:
        """producing: whose failure ends an update, too. failing: that, or a request to stop."""
        start = time.perf_counter()
        self._observer.phase("generating")
        groups = await or_failure(buffer.take_batch(), failing)
        update = await self._update(groups, time.perf_counter() - start, producing)
        try:
            trained = await self._publish(groups, update, producing)
        except BaseException:
            self._count_unpublished(groups, update)
            raise
        # Opening the next slots first lets generation overlap with all the bookkeeping below.
        await buffer.trained(groups)
        self._books.examine(self.step, trained.metrics, len(groups))
        self._books.tell_hooks(self.step, trained.metrics)
        self._is_whole = True
        self._saving.note_row(self.step, self._books.row(trained.metrics, self.ledger))
        try:
            await self._books.record(self.step, groups, trained)
            await self._save_if(self._saving.is_due(self.step, self._ends(), self._is_sound()))
            evaluated = await self._books.after_step(
                self.step, trained, self.ledger, self._evaluator, failing
            )
            await self._save_if(False)
        finally:
            self._saving.finish(self._books.eval_scores)
        return evaluated

    def _ends(self) -> bool:
        return self.step == self._config.run.steps or self._books.wishes.stop

    def _is_sound(self) -> bool:
        return not (self._skipped.last_was_skipped or self._critic_skipped.last_was_skipped)

    async def _save_if(self, due: bool) -> None:
        """Where it is due, or a hook wishes it. After a skipped update nothing is worth saving."""
        if due or (self._books.wishes.save and self._is_sound()):
            self._books.saved()
            await self._saving.write(self.state())

    def _whole_state(self) -> LoopState | None:
        return self.state() if self._is_whole and self._is_sound() else None

    async def _update(
        self, groups: Sequence[ReadyGroup], wait: float, failing: asyncio.Task[None] | None
    ) -> Update:
        """Train, and count it. wait: seconds until the groups were there. failing: ends the wait early."""
        taken = time.perf_counter()
        self._observer.phase("training")
        self._is_whole = False
        shaped = self._shape(groups)
        kl_coef = self._kl.coef
        training = self._train_step.run(groups, shaped.scores, kl_coef, self.step + 1)
        async with self._workers.learners_turn():
            result = await or_failure(training, failing)
        self._skipped.count(result.optim, result.sums)
        self._critic_skipped.count(result.critic_optim, result.critic_sums)
        if result.stats.kl is not None and np.isfinite(result.stats.kl).all():
            self._kl.update(float(result.stats.kl.mean()), len(shaped.raw))
        self.episode += len(shaped.raw)
        self.step += 1
        return Update(shaped, result, kl_coef, wait, train=time.perf_counter() - taken)

    async def _publish(
        self, groups: Sequence[ReadyGroup], update: Update, failing: asyncio.Task[None] | None
    ) -> Trained:
        begun = time.perf_counter()
        self._observer.phase("publishing")
        report = await or_failure(self._workers.publisher.publish(self.step), failing)
        told = self._metrics(groups, update, report, time.perf_counter() - begun)
        return Trained(update.shaped, update.result, told)

    def _metrics(
        self, groups: Sequence[ReadyGroup], update: Update, published: PublishReport | None, sync: float
    ) -> Metrics:
        done = time.perf_counter()
        clock, self._last_done = StepClock(done - self._last_done, update.wait, update.train, sync), done
        so_far = self.episode, self.step - 1, update.kl_coef
        return step_metrics(groups, update.shaped, update.result, clock, published, *so_far)

    def _count_unpublished(self, groups: Sequence[ReadyGroup], update: Update) -> None:
        """The update is made, only no engine has it: a state to keep, unless an alarm comes of it."""
        for group in groups:
            self.ledger.move(group.summary.group_id, GroupState.TRAINED, self.step - 1)
        metrics = self._metrics(groups, update, None, math.nan)
        with contextlib.suppress(HealthError):  # reported with its metrics; what failed is the publication
            self._books.report(self.step, metrics, len(groups))
            self._is_whole = True

    def _shape(self, groups: Sequence[ReadyGroup]) -> ShapedScores:
        shaped = shape_groups(groups, self._workers.scoring.weights, self._config, self._moments)
        self._moments = shaped.moments
        return shaped

    async def save(self, folder: Path | None = None) -> Path:
        """A checkpoint of now; folder None: checkpoints/step-N, where the retention rule holds."""
        state, workers = self.state(), self._workers
        if folder is None:
            path = await self._saving.write(state)
            self._saving.finish(state.scores)
            return path
        self._observer.phase("saving")
        path = await write_checkpoint(folder, state, workers.learner, workers.critic)
        for hook in self._hooks:
            hook.on_save(self.step, path)
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
