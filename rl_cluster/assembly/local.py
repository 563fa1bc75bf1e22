"""All workers of a run in this process: a RunConfig and a Plan in, a Cluster out. No Ray, no vLLM.

The same loop, learner verbs and arithmetic as on a cluster. Learner, sampler and reference take turns on the
event loop's thread; scoring functions run in threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.reference_model import ReferenceModel, ReferenceSpec
from learners.rank import LearnerRank
from rl_cluster.assembly.cluster import Cluster
from rl_cluster.assembly.given import Given
from rl_cluster.assembly.learner import critic_spec, policy_spec, start_learner
from rl_cluster.assembly.local_rollout import LocalGenerator, LocalPublisher, LocalReference, LocalRollout
from rl_cluster.config.planning.plan import Plan
from rl_cluster.config.run import RunConfig
from rl_cluster.environments.playing.for_runs import configured_factory
from rl_cluster.environments.playing.hosting import EnvironmentPool
from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.loop.loop import Workers
from rl_cluster.loop.producer import Scoring
from rl_cluster.loop.report import Metrics
from rl_cluster.modeling.end_tokens import joined_ids
from rl_cluster.modeling.load import load_policy
from rl_cluster.modeling.policy import PolicyModel, base_model
from rl_cluster.protocols import Scorer
from rl_cluster.rewards.failures import FailurePolicy
from rl_cluster.rewards.local_scorers import make_local_scorers
from rl_cluster.trajectory import Prompt


@dataclass(frozen=True)
class LocalSamplers:
    """As assembly.workers.Samplers: enough to evaluate."""

    rollouts: tuple[LocalRollout, ...]
    scorers: tuple[Scorer, ...]
    pool: RolloutPool
    scoring: Scoring
    num_threads_before: int

    async def close(self) -> None:
        """PyTorch has as many threads again as before the start."""
        for rollout in self.rollouts:
            rollout.close()
        torch.set_num_threads(self.num_threads_before)


async def start_local_cluster(
    config: RunConfig,
    plan: Plan,
    model_path: str,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    given: Given | None = None,
) -> Cluster:
    """Loads the models; raises BadInputError as they do. prompts: unused, weights need no probe here."""
    del prompts
    threads = torch.get_num_threads()
    try:
        return await _start(config, plan, model_path, tokenizer, given or Given(), threads)
    except BaseException:
        torch.set_num_threads(threads)
        raise


async def _start(
    config: RunConfig, plan: Plan, model_path: str, tokenizer: Any, given: Given, threads: int
) -> Cluster:
    spec = policy_spec(config, plan, model_path)
    learner = await start_learner(config, plan, spec, "learner")
    critic = None
    if plan.critic == "separate":
        critic = await start_learner(config, plan, critic_spec(config, plan, model_path), "critic")
    (rank,) = await learner.apply(_itself)
    samplers = await _samplers(config, plan, rank.model, tokenizer, given, threads)
    (rollout,) = samplers.rollouts
    reference = _reference(config, plan, model_path)
    workers = Workers(
        pool=samplers.pool,
        scoring=samplers.scoring,
        learner=learner,
        publisher=LocalPublisher(rollout),
        critic=critic,
        reference=reference,
        learner_is_reference=plan.learner_is_reference,
        health=health,
    )
    return Cluster(workers, samplers, learner, critic, reference)


async def start_local_samplers(
    config: RunConfig, plan: Plan, model_path: str, tokenizer: Any, given: Given | None = None
) -> LocalSamplers:
    """Sampling and scoring without a learner, as assembly.workers.start_samplers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.of("rollout")[0].threads)
    model = config.model
    policy = load_policy(model_path, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
    policy = policy.to(plan.device).requires_grad_(False)
    return await _samplers(config, plan, policy, tokenizer, given or Given(), threads)


async def _samplers(
    config: RunConfig, plan: Plan, policy: PolicyModel, tokenizer: Any, given: Given, num_threads_before: int
) -> LocalSamplers:
    """policy: used as it is, live."""
    eos = eos_token_ids(policy, tokenizer)
    most = config.rollout.max_concurrent_sequences
    rollout = LocalRollout(
        LocalGenerator(policy, tokenizer, eos, most),
        LocalGenerator(policy, tokenizer, eos, most),
        tokenizer,
        eos,
        plan.derived.max_sequence_tokens,
        await _environments(config, tokenizer, given, eos),
    )
    scorers = make_local_scorers(config.rewards, tokenizer, functions=given.scorers, device=plan.device)
    return LocalSamplers(
        rollouts=(rollout,),
        scorers=scorers,
        pool=RolloutPool((rollout,), config.rollout.deadline_seconds),
        scoring=Scoring(scorers, FailurePolicy.from_config(config.rewards)),
        num_threads_before=num_threads_before,
    )


async def _environments(
    config: RunConfig, tokenizer: Any, given: Given, eos: frozenset[int]
) -> EnvironmentPool | None:
    settings = config.rollout.environment
    if settings is None:
        return None
    pool = EnvironmentPool(configured_factory(settings, given.environment), tokenizer, settings, eos)
    await pool.prepare()
    return pool


def eos_token_ids(policy: PolicyModel, tokenizer: Any) -> frozenset[int]:
    """Of the model's generation config and of its tokenizer, as the engine has them."""
    configured = getattr(base_model(policy.lm), "generation_config", None)
    return joined_ids(getattr(configured, "eos_token_id", None), tokenizer.eos_token_id)


async def health() -> Metrics:
    """Resident memory of this process."""
    import psutil

    return {"health/rss_bytes/local": float(psutil.Process(os.getpid()).memory_info().rss)}


def _itself(rank: LearnerRank) -> LearnerRank:
    return rank


def _reference(config: RunConfig, plan: Plan, model_path: str) -> LocalReference | None:
    if plan.reference != "worker":
        return None
    spec = ReferenceSpec(
        model=config.model.reference_path or model_path,
        dtype=config.model.dtype,
        device=plan.device,
        temperature=config.rollout.temperature,
        tokens_per_pass=config.batch.tokens_per_micro_batch,
        num_threads=plan.of("learner")[0].threads,
        trust_remote_code=config.model.trust_remote_code,
    )
    return LocalReference(ReferenceModel(spec))
