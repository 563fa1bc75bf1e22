"""All workers of a run, started together and ended together: a RunConfig and a Plan in, a Cluster out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.engine_spec import EngineSpec
from actors.reference_model import ReferenceSpec
from actors.reference_worker import ReferenceHandle, create_reference_worker
from actors.rollout_worker import RolloutHandle, create_rollout_worker
from actors.scorers import AnyScorer, make_scorers, start_scorers
from learners.group import LearnerGroup
from learners.rank import LearnerRank
from learners.weight_sender import LearnerSender
from rl_cluster.assembly.cluster import Cluster
from rl_cluster.assembly.environment import Factory, run_environment
from rl_cluster.assembly.given import Given
from rl_cluster.assembly.learner import critic_spec, policy_spec, start_learner
from rl_cluster.assembly.placement import Nodes
from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.config.planning.plan import Plan
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import DeadlineError
from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.loop.loop import Workers
from rl_cluster.loop.producer import Scoring
from rl_cluster.loop.publisher import PROBE_TOLERANCE, EnginePublisher, PublisherSpec
from rl_cluster.loop.report import Metrics
from rl_cluster.rewards.failures import FailurePolicy
from rl_cluster.trajectory import Prompt

PROBE_TOKENS = 32


@dataclass(frozen=True)
class Samplers:
    """Rollout workers and scorers: enough to evaluate."""

    rollouts: tuple[RolloutHandle, ...]
    scorers: tuple[AnyScorer, ...]
    pool: RolloutPool
    scoring: Scoring

    async def close(self) -> None:
        await asyncio.gather(
            *(rollout.shutdown() for rollout in self.rollouts), *(scorer.close() for scorer in self.scorers)
        )


def engine_spec(config: RunConfig, plan: Plan, model_path: str) -> EngineSpec:
    """What every rollout worker's engine is started with."""
    rollout, lora = config.rollout, config.model.lora
    return EngineSpec(
        model=model_path,
        dtype=config.model.dtype,
        device=plan.device,
        max_model_len=_max_model_len(plan),
        max_num_seqs=rollout.max_concurrent_sequences,
        tensor_parallel_size=rollout.tensor_parallel_size,
        kv_cache_gib=rollout.kv_cache_gib,
        gpu_memory_fraction=rollout.gpu_memory_fraction,
        enforce_eager=rollout.enforce_eager,
        seed=config.run.seed,
        num_threads=plan.of("rollout")[0].threads,
        sleep_mode=config.cluster.colocate,
        lora_rank=None if lora is None else lora.rank,
        sync_backend=plan.sync_backend,
        trust_remote_code=config.model.trust_remote_code,
    )


def _max_model_len(plan: Plan) -> int:
    """One token more than any sequence, for the probe; vLLM refuses more than the model has positions."""
    wanted = plan.derived.max_sequence_tokens + 1
    positions = None if plan.shape is None else plan.shape.max_positions
    return wanted if positions is None else min(wanted, positions)


async def start_samplers(
    config: RunConfig, plan: Plan, model_path: str, tokenizer: Any, given: Given
) -> Samplers:
    """Start rollout workers and scorers at once; if one fails, end the others and raise its error."""
    environment = run_environment(config, given)
    nodes = Nodes(plan)
    deadline = config.cluster.start_deadline_seconds
    spec = engine_spec(config, plan, model_path)
    rollouts = tuple(create_rollout_worker(w.name, spec, nodes.options(w)) for w in plan.of("rollout"))
    scorers = make_scorers(
        config.rewards,
        tokenizer,
        functions=given.scorers,
        device=plan.device,
        **nodes.reward_model_claims(),
        start_seconds=deadline,
    )
    scoring = Scoring(scorers, FailurePolicy.from_config(config.rewards))
    samplers = Samplers(rollouts, scorers, RolloutPool(rollouts, config.rollout.deadline_seconds), scoring)
    results = await asyncio.gather(
        _start_rollouts(rollouts, deadline, environment, config.rollout.environment),
        start_scorers(scorers),
        return_exceptions=True,
    )
    if errors := [result for result in results if isinstance(result, BaseException)]:
        await samplers.close()
        raise errors[0]
    return samplers


async def start_cluster(
    config: RunConfig,
    plan: Plan,
    model_path: str,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    given: Given,
) -> Cluster:
    """Start everything at once; if one worker fails, end the others and raise its error."""
    nodes = Nodes(plan)
    results = await asyncio.gather(
        start_samplers(config, plan, model_path, tokenizer, given),
        _start_learner(config, plan, model_path),
        _start_critic(config, plan, model_path),
        _start_reference(config, plan, model_path, nodes),
        return_exceptions=True,
    )
    if errors := [result for result in results if isinstance(result, BaseException)]:
        await _end(results)
        raise errors[0]
    samplers, learner, critic, reference = results
    assert isinstance(samplers, Samplers)
    assert isinstance(learner, LearnerGroup)
    assert not isinstance(critic, BaseException)
    assert not isinstance(reference, BaseException)
    workers = Workers(
        pool=samplers.pool,
        scoring=samplers.scoring,
        learner=learner,
        publisher=_publisher(config, plan, learner, samplers.rollouts, prompts[0]),
        critic=critic,
        reference=reference,
        learner_is_reference=plan.learner_is_reference,
        turns=SharedGpus(samplers.rollouts) if config.cluster.colocate else None,
        health=Health(samplers.rollouts, learner, critic),
    )
    return Cluster(workers, samplers, learner, critic, reference)


async def _end(results: Sequence[Any]) -> None:
    for result in results:
        if isinstance(result, Samplers):
            await result.close()
        elif isinstance(result, LearnerGroup | ReferenceHandle):
            result.close()


def _publisher(
    config: RunConfig, plan: Plan, learner: LearnerGroup, rollouts: Sequence[RolloutHandle], probe: Prompt
) -> EnginePublisher:
    longest = min(PROBE_TOKENS, _max_model_len(plan) - 1)
    spec = PublisherSpec(
        backend=plan.sync_backend,
        bucket_bytes=config.sync.bucket_mib * 2**20,
        deadline_seconds=config.sync.deadline_seconds,
        probe=_probes(probe.tokens, longest),
        tolerance=PROBE_TOLERANCE[config.model.dtype],
        in_flight=config.asynchrony.in_flight_updates,
        lora=plan.adapters_only,
        prove=True,
    )
    return EnginePublisher(spec, LearnerSender(learner, plan.sync_backend), rollouts)


def _probes(tokens: np.ndarray, longest: int) -> tuple[np.ndarray, ...]:
    """int32 [P] each: a long one, and a short one behind it whose pass must not see the first."""
    whole = np.resize(tokens, longest).astype(np.int32)
    return whole, whole[::-1][: max(2, longest // 2)].copy()


async def _start_rollouts(
    rollouts: Sequence[RolloutHandle],
    deadline: float,
    environment: Factory | None,
    settings: EnvironmentConfig | None,
) -> None:
    await asyncio.gather(*(rollout.start(deadline) for rollout in rollouts))
    if environment is not None and settings is not None:
        await asyncio.gather(*(r.set_environment(environment, settings, deadline) for r in rollouts))
    await asyncio.gather(*(rollout.set_version(0) for rollout in rollouts))


async def _start_learner(config: RunConfig, plan: Plan, model_path: str) -> LearnerGroup:
    spec = policy_spec(config, plan, model_path)
    return await start_learner(config, plan, spec, "learner")


async def _start_critic(config: RunConfig, plan: Plan, model_path: str) -> LearnerGroup | None:
    if plan.critic != "separate":
        return None
    spec = critic_spec(config, plan, model_path)
    return await start_learner(config, plan, spec, "critic")


async def _start_reference(
    config: RunConfig, plan: Plan, model_path: str, nodes: Nodes
) -> ReferenceHandle | None:
    if plan.reference != "worker":
        return None
    (worker,) = plan.of("reference")
    spec = ReferenceSpec(
        model=config.model.reference_path or model_path,
        dtype=config.model.dtype,
        device=plan.device,
        temperature=config.rollout.temperature,
        tokens_per_pass=config.batch.tokens_per_micro_batch,
        num_threads=worker.threads,
        trust_remote_code=config.model.trust_remote_code,
    )
    reference = create_reference_worker(worker.name, spec, nodes.options(worker))
    deadline = config.cluster.start_deadline_seconds
    try:
        await asyncio.wait_for(reference.start(), deadline)
    except TimeoutError as error:
        raise DeadlineError(
            f"{worker.name} did not start within cluster.start_deadline_seconds={deadline:g}"
        ) from error
    return reference


@dataclass(frozen=True)
class SharedGpus:
    """Implements loop.Turns by vLLM's sleep mode; the optimizer is offloaded by learner.offload_optimizer."""

    rollouts: Sequence[RolloutHandle]

    async def to_learner(self) -> None:
        await asyncio.gather(*(rollout.sleep() for rollout in self.rollouts))

    async def to_engines(self) -> None:
        await asyncio.gather(*(rollout.wake() for rollout in self.rollouts))


def _rss(rank: LearnerRank) -> int:
    import psutil

    return int(psutil.Process(os.getpid()).memory_info().rss)


@dataclass(frozen=True)
class Health:
    """Resident memory of every worker, as metrics."""

    rollouts: Sequence[RolloutHandle]
    learner: LearnerGroup
    critic: LearnerGroup | None

    async def __call__(self) -> Metrics:
        metrics: Metrics = {}
        progress = await asyncio.gather(*(rollout.progress() for rollout in self.rollouts))
        for rollout, state in zip(self.rollouts, progress, strict=True):
            metrics[f"health/rss_bytes/{rollout.name}"] = float(state.rss_bytes)
        for name, group in (("learner", self.learner), ("critic", self.critic)):
            if group is not None:
                for rank, size in enumerate(await group.apply(_rss)):
                    metrics[f"health/rss_bytes/{name}-{rank}"] = float(size)
        return metrics
