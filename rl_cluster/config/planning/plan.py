"""A checked RunConfig and a Machine in, a Plan out: everything that is decided before a worker starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_cluster.config.algorithm import critic_of
from rl_cluster.config.planning.advice import advise
from rl_cluster.config.planning.derive import Derived, derive
from rl_cluster.config.planning.machine import GIB, Machine
from rl_cluster.config.planning.memory import (
    REFERENCE_BASE,
    SCORER_BASE,
    LearnerSizes,
    Memory,
    engine_memory,
    forward_memory,
    learner_memory,
)
from rl_cluster.config.planning.model_shape import ModelShape, find_shape, shape_of_folder
from rl_cluster.config.planning.placement import (
    Role,
    WorkerPlan,
    place,
    reference_home,
    with_memory,
    with_threads_for,
)
from rl_cluster.config.reward import RewardModelScorer, scorer_name
from rl_cluster.config.run import RunConfig


@dataclass(frozen=True)
class Plan:
    """Decided once, printed by --dry-run, executed by the assembly.

    reference: a worker with a frozen copy, the learner with its adapters off or with a frozen copy beside
    the policy, or none (β = 0).
    critic: a head on the policy's trunk, a second learner, or none.
    adapters_only: LoRA; only the adapters are trained and published.
    advice: what would run, but hardly as intended.
    """

    device: Literal["cpu", "cuda"]
    machine: Machine
    shape: ModelShape | None
    derived: Derived
    workers: tuple[WorkerPlan, ...]
    sync_backend: Literal["gloo", "nccl", "ipc"]
    adapters_only: bool
    reference: Literal["none", "worker", "adapter_off", "beside_policy"]
    critic: Literal["none", "shared", "separate"]
    synchronous: bool
    evaluates: bool
    advice: tuple[str, ...]

    @property
    def learner_is_reference(self) -> bool:
        """The learner answers for the reference, too."""
        return self.reference in ("adapter_off", "beside_policy")

    def of(self, role: Role) -> tuple[WorkerPlan, ...]:
        return tuple(worker for worker in self.workers if worker.role == role)


def resolve_device(config: RunConfig, machine: Machine) -> Literal["cpu", "cuda"]:
    if config.cluster.device == "auto":
        return "cuda" if machine.gpus > 0 else "cpu"
    return config.cluster.device


def resolve_backend(config: RunConfig, device: str) -> Literal["gloo", "nccl", "ipc"]:
    """auto: gloo on CPUs; on a shared GPU ipc, for adapters gloo (NCCL refuses two ranks on one GPU)."""
    if config.sync.backend != "auto":
        return config.sync.backend
    if device == "cpu":
        return "gloo"
    if config.cluster.colocate:
        return "ipc" if config.model.lora is None else "gloo"
    return "nccl"


def make_plan(config: RunConfig, machine: Machine) -> Plan:
    """Expects a config that passed check_config; starts nothing and loads no weights."""
    device = resolve_device(config, machine)
    shape = find_shape(config.model)
    derived = derive(config, shape)
    size = None if shape is None else shape.num_parameters
    placed = with_threads_for(place(config, machine, device), size, config.cluster.cpus_per_worker)
    workers = tuple(with_memory(w, _memory(config, machine, shape, derived, w)) for w in placed)
    critic = critic_of(config.algorithm)
    return Plan(
        device=device,
        machine=machine,
        shape=shape,
        derived=derived,
        workers=workers,
        sync_backend=resolve_backend(config, device),
        adapters_only=config.model.lora is not None,
        reference=reference_home(config),
        critic="none" if critic is None else "separate" if critic.separate else "shared",
        synchronous=config.asynchrony.max_policy_lag == 0,
        evaluates=config.data.held_out > 0,
        advice=advise(config, machine, device, derived, workers),
    )


def _memory(
    config: RunConfig, machine: Machine, shape: ModelShape | None, derived: Derived, worker: WorkerPlan
) -> Memory | None:
    on_gpu = bool(worker.gpus)
    if worker.role == "function":
        return Memory((("process", SCORER_BASE),), on_gpu=False)
    if worker.role == "reward_model":
        return _reward_model_memory(config, worker, on_gpu)
    if shape is None:
        return None
    dtype, batch_tokens = config.model.dtype, derived.micro_batch_tokens
    if worker.role == "rollout":
        parallel = config.rollout.tensor_parallel_size
        kv_bytes = int(config.rollout.kv_cache_gib * GIB)
        if on_gpu:
            budget = int(config.rollout.gpu_memory_fraction * machine.gpu_memory)
            weights = engine_memory(shape, dtype, 0, parallel, on_gpu).total
            kv_bytes = max(0, budget - weights)
        return engine_memory(shape, dtype, kv_bytes, parallel, on_gpu)
    if worker.role == "reference":
        return forward_memory(shape, dtype, batch_tokens, REFERENCE_BASE, on_gpu)
    lora = config.model.lora
    sizes = LearnerSizes(
        trained=shape.num_parameters if lora is None else shape.lora_parameters(lora.rank),
        dtype=dtype,
        zero_stage=config.learner.zero_stage,
        num_ranks=config.learner.num_ranks,
        micro_batch_tokens=batch_tokens,
        gradient_checkpointing=config.model.gradient_checkpointing,
        offload_optimizer=config.learner.offload_optimizer,
        with_reference=worker.role == "learner" and reference_home(config) == "beside_policy",
    )
    return learner_memory(shape, sizes, on_gpu)


def _reward_model_memory(config: RunConfig, worker: WorkerPlan, on_gpu: bool) -> Memory | None:
    owner = worker.name.rsplit("-", 1)[0]
    scorers = [s for s in config.rewards.scorers if isinstance(s, RewardModelScorer)]
    scorer = next(s for s in scorers if scorer_name(s) == owner)
    shape = shape_of_folder(Path(scorer.path).expanduser(), scorer.path)
    if shape is None:
        return None
    return forward_memory(shape, scorer.dtype, scorer.tokens_per_batch, SCORER_BASE, on_gpu)
