"""A run whose workers are up: a configuration and prompts in, trained models and samples out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_cluster.assembly.cluster import Cluster
from rl_cluster.assembly.given import Given
from rl_cluster.config.planning.plan import Plan
from rl_cluster.config.run import RunConfig
from rl_cluster.data.load import PromptSets
from rl_cluster.data.randomness import sample_seeds
from rl_cluster.data.stream import PromptStream
from rl_cluster.errors import BadInputError
from rl_cluster.files.atomic import folder_atomically, write_atomically
from rl_cluster.loop.buffer import ReadyGroup, StageTimes
from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.loop.evaluation import Evaluator
from rl_cluster.loop.loop import TrainingLoop, train_sampling
from rl_cluster.loop.producer import Scoring
from rl_cluster.loop.report import Metrics
from rl_cluster.loop.state import LoopState
from rl_cluster.loop.stopping import StopRequest
from rl_cluster.metrics.observer import RunObserver
from rl_cluster.protocols import Ref
from rl_cluster.run_folder.card import write_model_card
from rl_cluster.run_folder.folder import RunFolder
from rl_cluster.trajectory import GroupTask, Prompt, SamplingSpec, Scores, TrajectoryGroup

FIRST_FREE_GROUP = 2**30
"""Ids of groups that the caller samples, far above those of the training stream (they seed the samples), and
such that they fit the int32 of a batch."""


class OpenRun:
    """Made by `open_run`. Every method leaves the run usable; `close` ends its workers."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        folder: RunFolder,
        tokenizer: Any,
        cluster: Cluster,
        observer: RunObserver,
        given: Given,
    ) -> None:
        self.config = config
        self.plan = plan
        self.folder = folder
        self.tokenizer = tokenizer
        self.cluster = cluster
        self.observer = observer
        self._given = given
        self.stop = StopRequest()
        """Heeded by `train`, which then raises StopAskedError."""
        self._loop: TrainingLoop | None = None
        self._next_group = FIRST_FREE_GROUP

    @property
    def step(self) -> int:
        """Steps trained so far, which is also the policy version."""
        return 0 if self._loop is None else self._loop.step

    @property
    def kl_coef(self) -> float:
        """β as the controller has it now."""
        return self.config.algorithm.kl.coef if self._loop is None else self._loop.kl_coef

    async def train(self, prompts: PromptSets, last_step: int, state: LoopState | None = None) -> Metrics:
        """Train until `last_step` steps are done; returns the last evaluation's metrics.

        state: of a checkpoint whose weights are loaded. Without one, a second call goes on from the first
        (weights, optimizer, KL controller, group numbers), with the prompts of now.
        """
        self._loop = self._new_loop(prompts, last_step, state)
        last = await self._loop.run()
        write_atomically(self.folder.ledger, json.dumps(self._loop.ledger.to_json()))
        return last

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int = 1, sampling: SamplingSpec | None = None
    ) -> list[TrajectoryGroup]:
        """Samples of the present policy, in the prompts' order. sampling: default as in training."""
        sampling = sampling or train_sampling(self.config)
        tasks = []
        for prompt in prompts:
            seeds = sample_seeds(self.config.run.seed, self._next_group, num_samples)
            tasks.append(GroupTask(self._next_group, prompt, seeds, sampling))
            self._next_group += 1
        pool, learner = self.cluster.workers.pool, self.cluster.workers.learner
        refs = [ref for _, ref in await asyncio.gather(*(pool.rollout(task) for task in tasks))]
        groups: list[TrajectoryGroup] = await learner.ask(_as_list, *refs)
        return groups

    async def train_on(self, groups: Sequence[TrajectoryGroup], scores: Sequence[np.ndarray]) -> Metrics:
        """One step on trajectories that the caller brings. scores: float64 [samples] per group."""
        workers = self.cluster.workers
        if self._loop is None:
            prompts = PromptSets(tuple(group.prompt for group in groups), ())
            self._loop = self._new_loop(prompts, self.config.run.steps, None)
        ready = []
        for group, values in zip(groups, scores, strict=True):
            ref: Ref = workers.learner.put(group)
            reference = None if workers.reference is None else await workers.reference.logprobs(ref)
            now = time.perf_counter()
            named = Scores("given", np.asarray(values, dtype=np.float64))
            times = StageTimes(now, now, now, now)
            ready.append(ReadyGroup(group.summary("caller", 0.0), ref, reference, (named,), times))
        return await self._loop.train_on(ready)

    async def evaluate(self, prompts: PromptSets) -> Metrics:
        """Of the held-out prompts; {} without any."""
        workers = self.cluster.workers
        evaluator = make_evaluator(self.config, prompts, workers.pool, workers.scoring)
        return {} if evaluator is None else (await evaluator.run()).metrics

    async def export(self) -> None:
        """The run folder's model/: weights (or adapter), tokenizer, card."""
        with folder_atomically(self.folder.model, "model") as partial:
            await self.cluster.workers.learner.export(partial)
            self.tokenizer.save_pretrained(partial)
        write_model_card(self.config, self.folder)

    async def weights(self) -> dict[str, Any]:
        """name -> tensor on the CPU: the trained weights under their Hugging Face names, and a shared value
        head's under value_head.; under LoRA the adapters. A copy."""
        from learners.whole_weights import whole_weights  # imports torch

        result: dict[str, Any] = (await self.cluster.learner.apply(whole_weights))[0]
        return result

    async def save(self, folder: Path | None = None) -> Path:
        """A checkpoint of now; folder None: checkpoints/step-N of the run. BadInputError before any step."""
        if self._loop is None:
            raise BadInputError("save_checkpoint: nothing has been trained yet; train first.")
        return await self._loop.save(folder)

    async def load(self, checkpoint: Path, prompts: PromptSets) -> None:
        """Go on from a checkpoint; `train` may then be given other prompts. Raises CheckpointError."""
        state = LoopState.read(checkpoint)
        await self.cluster.load(checkpoint)
        stream = PromptStream(prompts.train, self.config.run.seed, self.config.data.shuffle)
        state = replace(state, stream={**stream.state(), "position": state.stream["position"]})
        self._loop = self._new_loop(prompts, self.config.run.steps, state)
        await self.cluster.workers.publisher.publish(state.step)

    async def load_weights(self, checkpoint: Path) -> None:
        """The learner's state of a checkpoint, into the engines too; the loop stays where it is."""
        await self.cluster.load(checkpoint)
        await self.cluster.workers.publisher.publish(self.step)

    async def close(self) -> None:
        """End every worker."""
        await self.cluster.close()

    def _new_loop(self, prompts: PromptSets, last_step: int, state: LoopState | None) -> TrainingLoop:
        section = self.config.run.model_copy(update={"steps": last_step})
        config = self.config.model_copy(update={"run": section})
        stream = PromptStream(prompts.train, config.run.seed, config.data.shuffle)
        if state is None and self._loop is not None:
            state = self._loop.state()
            # Other prompts, the same run: only the position goes on.
            state = replace(state, stream={**stream.state(), "position": state.stream["position"]})
        workers = self.cluster.workers
        return TrainingLoop(
            config,
            workers,
            stream,
            make_evaluator(config, prompts, workers.pool, workers.scoring),
            self.observer,
            self.folder.path,
            state,
            self._given.hooks,
            self.stop,
        )


def _as_list(*groups: TrajectoryGroup) -> list[TrajectoryGroup]:
    return list(groups)


async def open_run(
    config: RunConfig,
    plan: Plan,
    folder: RunFolder,
    model_path: str,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    observer: RunObserver,
    given: Given | None = None,
) -> OpenRun:
    """Start the workers of cluster.backend; on Ray, inside ray_session. prompts: probe published weights."""
    given = given or Given()
    observer.phase("starting workers")
    if config.cluster.backend == "local":
        from rl_cluster.assembly.local import start_local_cluster

        cluster = await start_local_cluster(config, plan, model_path, tokenizer, prompts, given)
    else:
        from rl_cluster.assembly.workers import start_cluster

        cluster = await start_cluster(config, plan, model_path, tokenizer, prompts, given)
    return OpenRun(config, plan, folder, tokenizer, cluster, observer, given)


def eval_sampling(config: RunConfig) -> SamplingSpec:
    """The eval section; stops as in training."""
    return SamplingSpec(
        temperature=config.eval.temperature,
        max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        top_p=config.eval.top_p,
        stop=config.rollout.stop,
        stop_token_ids=config.rollout.stop_token_ids,
    )


def make_evaluator(
    config: RunConfig, prompts: PromptSets, pool: RolloutPool, scoring: Scoring
) -> Evaluator | None:
    """None without held-out prompts."""
    if not prompts.held_out:
        return None
    sampling = eval_sampling(config)
    return Evaluator(prompts.held_out, sampling, config.eval, config.run.seed, pool, scoring)
