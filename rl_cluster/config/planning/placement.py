"""Who works where: a RunConfig and a Machine in, one WorkerPlan per process out.

Frozen here, before Ray starts, so that `--dry-run` prints what the assembly does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from rl_cluster.config.algorithm import critic_of
from rl_cluster.config.planning.machine import Machine
from rl_cluster.config.planning.memory import Memory
from rl_cluster.config.reward import FunctionScorer, RewardModelScorer, scorer_name
from rl_cluster.config.run import RunConfig

Role = Literal["rollout", "learner", "critic", "reference", "reward_model", "function"]
MAX_THREADS_BESIDE_GPU = 8


@dataclass(frozen=True)
class WorkerPlan:
    """One process. node: 0 is the head. threads: OMP_NUM_THREADS of its own arithmetic.

    num_cpus, num_gpus: what it claims from Ray; claims of workers that take turns are fractions, so that
    all of them fit. gpus: indices on its node; several workers name the same ones when they share.
    memory: None where the model's size is not known.
    """

    name: str
    role: Role
    node: int
    threads: int
    num_cpus: float
    gpus: tuple[int, ...] = ()
    num_gpus: float = 0.0
    memory: Memory | None = None


@dataclass(frozen=True)
class _Slot:
    name: str
    role: Role
    num_gpus: int
    shares_with_learner: int | None = None


def reference_home(config: RunConfig) -> Literal["none", "worker", "adapter_off", "beside_policy"]:
    """A frozen model of its own; under LoRA the base model with its adapters off, unless another is named.
    The exact divergence needs both models' logits in one process: a frozen copy on every learner rank."""
    model, kl = config.model, config.algorithm.kl
    if kl.coef == 0:
        return "none"
    if kl.estimator == "exact":
        return "beside_policy"
    return "worker" if model.lora is None or model.reference_path is not None else "adapter_off"


def place(config: RunConfig, machine: Machine, device: str) -> tuple[WorkerPlan, ...]:
    """The workers in the order in which they get GPUs. Expects a config that passed config/checks/run.py.

    cluster.backend = local: the roles that one process plays in turn, on one GPU if there is any.
    """
    homes: list[tuple[int, tuple[int, ...]]]
    slots = _slots(config, on_gpu=device == "cuda")
    if config.cluster.backend == "local":
        homes = [(0, (0,) if slot.num_gpus else ()) for slot in slots]
    else:
        homes = _homes(config, slots, machine) if device == "cuda" else _cpu_homes(slots, machine)
    return _with_claims(config, machine, device, slots, homes)


def _slots(config: RunConfig, on_gpu: bool) -> list[_Slot]:
    one = 1 if on_gpu else 0
    tensor_parallel = config.rollout.tensor_parallel_size if on_gpu else 0
    slots = [_Slot(f"learner-{i}", "learner", one) for i in range(config.learner.num_ranks)]
    slots += [_Slot(f"rollout-{i}", "rollout", tensor_parallel) for i in range(config.rollout.num_workers)]
    if reference_home(config) == "worker":
        slots.append(_Slot("reference-0", "reference", one))
    critic = critic_of(config.algorithm)
    if critic is not None and critic.separate:
        ranks = range(config.learner.num_ranks)
        slots += [_Slot(f"critic-{i}", "critic", one, shares_with_learner=i) for i in ranks]
    for scorer in config.rewards.scorers:
        if isinstance(scorer, RewardModelScorer | FunctionScorer):
            role: Role = "reward_model" if isinstance(scorer, RewardModelScorer) else "function"
            gpus = one if role == "reward_model" else 0
            names = [f"{scorer_name(scorer)}-{i}" for i in range(scorer.num_workers)]
            slots += [_Slot(name, role, gpus) for name in names]
    return slots


def num_gpus_needed(config: RunConfig) -> int:
    """GPUs that the run occupies when it runs on GPUs."""
    if config.cluster.colocate:
        return config.rollout.num_workers * config.rollout.tensor_parallel_size
    slots = _slots(config, on_gpu=True)
    return sum(slot.num_gpus for slot in slots if slot.shares_with_learner is None)


def _cpu_homes(slots: list[_Slot], machine: Machine) -> list[tuple[int, tuple[int, ...]]]:
    """Nodes in turn within each role."""
    counts: dict[str, int] = {}
    homes: list[tuple[int, tuple[int, ...]]] = []
    for slot in slots:
        index = counts.get(slot.role, 0)
        counts[slot.role] = index + 1
        homes.append((index % machine.num_nodes, ()))
    return homes


def _homes(config: RunConfig, slots: list[_Slot], machine: Machine) -> list[tuple[int, tuple[int, ...]]]:
    """(node, GPUs) of each slot. Without colocation each has its own GPUs, tensor-parallel groups on one
    node; with it the engines and the learner lie over each other, and the rest goes round."""
    per_node = machine.gpus
    next_free, engine_next, around = 0, 0, 0
    homes: list[tuple[int, tuple[int, ...]]] = []
    for slot in slots:
        if slot.num_gpus == 0:
            first, count = 0, 0
        elif slot.shares_with_learner is not None:
            first, count = slot.shares_with_learner, 1
        elif config.cluster.colocate and slot.role == "rollout":
            first, count = engine_next, slot.num_gpus
            engine_next += count
        elif config.cluster.colocate and slot.role != "learner":
            first, count = around % config.learner.num_ranks, 1
            around += 1
        else:
            left = per_node - next_free % per_node
            first = next_free if slot.num_gpus <= left else next_free + left
            count = slot.num_gpus
            next_free = first + count
        homes.append((first // per_node, tuple(range(first % per_node, first % per_node + count))))
    return homes


def _with_claims(
    config: RunConfig,
    machine: Machine,
    device: str,
    slots: list[_Slot],
    homes: list[tuple[int, tuple[int, ...]]],
) -> tuple[WorkerPlan, ...]:
    on_node = [0] * machine.num_nodes
    sharers: dict[tuple[int, int], int] = {}
    of_role: dict[tuple[str, int], int] = {}
    for slot, (node, gpus) in zip(slots, homes, strict=True):
        on_node[node] += 1
        of_role[slot.role, node] = of_role.get((slot.role, node), 0) + 1
        for gpu in gpus:
            sharers[node, gpu] = sharers.get((node, gpu), 0) + 1
    workers = []
    for slot, (node, gpus) in zip(slots, homes, strict=True):
        share = machine.cores / on_node[node]
        peers = of_role[slot.role, node]
        threads = _threads(config, machine, device, slot.role, peers, on_node[node])
        workers.append(
            WorkerPlan(
                name=slot.name,
                role=slot.role,
                node=node,
                threads=threads,
                num_cpus=_floor(min(float(threads), share)),
                gpus=gpus,
                num_gpus=sum(_floor(1 / sharers[node, gpu]) for gpu in gpus),
            )
        )
    return tuple(workers)


def _threads(config: RunConfig, machine: Machine, device: str, role: Role, peers: int, on_node: int) -> int:
    """Threads of one worker that shares its node with `peers` workers of its own role, itself included.

    CPU, synchronous: engines and learner take turns, so each role may use all cores; what runs beside the
    engines (reference, reward models) gets half. Asynchronous: engines and learner get half each, the
    others one thread. Beside GPUs an even share is enough.
    """
    if role == "function":
        return 1
    if config.cluster.cpus_per_worker is not None:
        return config.cluster.cpus_per_worker
    if device == "cuda":
        return max(1, min(MAX_THREADS_BESIDE_GPU, machine.cores // on_node))
    alternating = config.asynchrony.max_policy_lag == 0
    beside = role in ("reference", "reward_model")
    if alternating:
        return max(1, machine.cores // (2 if beside else 1) // peers)
    return 1 if beside else max(1, machine.cores // 2 // peers)


def _floor(value: float) -> float:
    """Ray counts in ten-thousandths; two decimals are readable, rounding down always fits."""
    return math.floor(value * 100) / 100 if value < 1 else float(math.floor(value))


ONE_THREAD_LIMIT = 300_000
"""Parameters up to which a model's matrices are too small to be worth sharing out among threads. At 600,000 a
second thread still takes a quarter off an iteration (bench/local_backend.py, quiet machine)."""


def with_threads_for(
    workers: tuple[WorkerPlan, ...], num_parameters: int | None, asked: int | None
) -> tuple[WorkerPlan, ...]:
    """On CPUs, one thread each for a small model unless cluster.cpus_per_worker (asked) says otherwise.

    Threads that wait for each other by spinning get in the way of every other process: on a busy machine a
    small step took a hundred times as long with two of them.
    """
    if asked is not None or num_parameters is None or num_parameters > ONE_THREAD_LIMIT:
        return workers
    return tuple(worker if worker.gpus else replace(worker, threads=1) for worker in workers)


def with_memory(worker: WorkerPlan, memory: Memory | None) -> WorkerPlan:
    return replace(worker, memory=memory)
