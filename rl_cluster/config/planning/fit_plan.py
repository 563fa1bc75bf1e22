"""A checked FitConfig and a Machine in, a FitPlan out: learner ranks only, decided before any starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_cluster.config.checks.fit import on_cpu
from rl_cluster.config.fit import FitConfig, RewardObjective
from rl_cluster.config.planning.machine import Machine
from rl_cluster.config.planning.memory import LearnerSizes, Memory, learner_memory
from rl_cluster.config.planning.model_shape import ModelShape, find_shape
from rl_cluster.config.planning.placement import MAX_THREADS_BESIDE_GPU, Role, WorkerPlan, with_threads_for


@dataclass(frozen=True)
class FitPlan:
    """max_length: tokens of prompt and response, at most the model's positions."""

    device: Literal["cpu", "cuda"]
    machine: Machine
    shape: ModelShape | None
    workers: tuple[WorkerPlan, ...]
    max_length: int

    def of(self, role: Role) -> tuple[WorkerPlan, ...]:
        return tuple(worker for worker in self.workers if worker.role == role)


def make_fit_plan(config: FitConfig, machine: Machine) -> FitPlan:
    """Expects a config that passed check_fit_config; starts nothing and loads no weights."""
    device: Literal["cpu", "cuda"] = "cpu" if on_cpu(config, machine) else "cuda"
    shape = find_shape(config.model)
    length = max_sequence(config, shape)
    memory = _memory(config, shape, length, device)
    ranks = range(config.learner.num_ranks)
    placed = tuple(_rank(config, machine, device, rank, memory) for rank in ranks)
    size = None if shape is None else shape.num_parameters
    workers = with_threads_for(placed, size, config.cluster.cpus_per_worker)
    return FitPlan(device, machine, shape, workers, length)


def max_sequence(config: FitConfig, shape: ModelShape | None) -> int:
    """data.max_length, held within the model's positions; a reward row takes one more (its dummy token)."""
    if shape is None or shape.max_positions is None:
        return config.data.max_length
    return min(config.data.max_length, shape.max_positions - isinstance(config.objective, RewardObjective))


def _rank(config: FitConfig, machine: Machine, device: str, rank: int, memory: Memory | None) -> WorkerPlan:
    """On CPUs ranks go round the nodes and share a node's cores; on GPUs they fill one node after another."""
    num_ranks, nodes = config.learner.num_ranks, machine.num_nodes
    gpus: tuple[int, ...] = ()
    if device == "cuda":
        node, gpus = rank // machine.gpus, (rank % machine.gpus,)
        peers = min(machine.gpus, num_ranks - node * machine.gpus)
        default = min(MAX_THREADS_BESIDE_GPU, machine.cores // peers)
    else:
        node = rank % nodes
        peers = len(range(node, num_ranks, nodes))
        default = machine.cores // peers
    threads = config.cluster.cpus_per_worker or max(1, default)
    return WorkerPlan(
        name=f"learner-{rank}",
        role="learner",
        node=node,
        threads=threads,
        num_cpus=float(min(threads, max(1, machine.cores // peers))),
        gpus=gpus,
        num_gpus=float(len(gpus)),
        memory=memory,
    )


def _memory(config: FitConfig, shape: ModelShape | None, length: int, device: str) -> Memory | None:
    if shape is None:
        return None
    lora = config.model.lora
    sizes = LearnerSizes(
        trained=shape.num_parameters if lora is None else shape.lora_parameters(lora.rank),
        dtype=config.model.dtype,
        zero_stage=config.learner.zero_stage,
        num_ranks=config.learner.num_ranks,
        micro_batch_tokens=max(config.batch.tokens_per_micro_batch, 2 * length),
        gradient_checkpointing=config.model.gradient_checkpointing,
        offload_optimizer=config.learner.offload_optimizer,
    )
    return learner_memory(shape, sizes, device == "cuda")
