"""Learner groups as the plan wants them: a RunConfig and a Plan in, running LearnerGroups out."""

from __future__ import annotations

from dataclasses import replace

from learners.group import LearnerGroup
from learners.spec import Kind, LearnerSpec
from learners.start import start_local_learner, start_ray_learner
from rl_cluster.algorithms.table import critic_of
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.planning.fit_plan import FitPlan
from rl_cluster.config.planning.placement import Role
from rl_cluster.config.planning.plan import Plan
from rl_cluster.config.run import OptimizerConfig, RunConfig

SLEEP_WHEN_IDLE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
"""OpenMP threads that wait by spinning would take the cores from the engine, whose turn it then is."""


def learner_spec(
    config: RunConfig,
    plan: Plan,
    model_path: str,
    *,
    optimizer: OptimizerConfig | None = None,
    total_updates: int | None = None,
    kind: Kind = "policy",
) -> LearnerSpec:
    """optimizer, total_updates: the run's own unless given. kind: of a critic, too."""
    worker = plan.of("critic" if kind == "critic" else "learner")[0]
    return LearnerSpec(
        model_path=model_path,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        tokens_per_micro_batch=config.batch.tokens_per_micro_batch,
        total_steps=total_updates or plan.derived.total_updates,
        optimizer=optimizer or config.optimizer,
        dtype=config.model.dtype,
        kind=kind,
        lora=None if kind == "critic" else config.model.lora,
        disable_dropout=config.model.disable_dropout,
        gradient_checkpointing=config.model.gradient_checkpointing,
        trust_remote_code=config.model.trust_remote_code,
        engine="torch" if config.cluster.backend == "local" else "deepspeed",
        zero_stage=config.learner.zero_stage,
        offload_optimizer=config.learner.offload_optimizer,
        device=plan.device,
        num_threads=worker.threads,
        seed=config.run.seed,
        deadline_seconds=config.learner.deadline_seconds,
        start_deadline_seconds=config.cluster.start_deadline_seconds,
    )


def policy_spec(config: RunConfig, plan: Plan, model_path: str) -> LearnerSpec:
    """Of the run's policy, with a frozen reference beside it where the plan says so.

    Its schedule spans the updates that it makes itself: none while a separate critic learns alone.
    """
    critic = critic_of(config.algorithm)
    alone = critic.warmup_steps if critic is not None and critic.separate else 0
    spec = learner_spec(
        config,
        plan,
        model_path,
        total_updates=plan.derived.total_updates - alone * plan.derived.updates_per_step,
        kind="policy_with_values" if plan.critic == "shared" else "policy",
    )
    if plan.reference != "beside_policy":
        return spec
    return replace(spec, reference_path=config.model.reference_path or model_path)


def critic_spec(config: RunConfig, plan: Plan, model_path: str) -> LearnerSpec:
    """Of a separate critic; it has a learning rate and a model of its own where the configuration says so."""
    critic = critic_of(config.algorithm)
    assert critic is not None
    optimizer = config.optimizer
    if critic.learning_rate is not None:
        optimizer = optimizer.model_copy(update={"learning_rate": critic.learning_rate})
    return learner_spec(config, plan, critic.model or model_path, kind="critic", optimizer=optimizer)


async def start_learner(
    config: RunConfig | FitConfig, plan: Plan | FitPlan, spec: LearnerSpec, name: str
) -> LearnerGroup:
    """On the backend of the run; on Ray one rank per planned worker, with what it may claim."""
    if config.cluster.backend == "local":
        return start_local_learner(spec, f"{name}-0")
    from rl_cluster.assembly.placement import Nodes  # takes Ray with it

    nodes = Nodes(plan)
    role: Role = "critic" if spec.kind == "critic" else "learner"
    options = [nodes.options(worker) for worker in plan.of(role)]
    return await start_ray_learner(spec, len(options), name=name, options=options, env_vars=SLEEP_WHEN_IDLE)
