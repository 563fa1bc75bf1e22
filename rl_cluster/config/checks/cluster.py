"""Checks of workers against the machine: cores, GPUs, memory, and how weights can travel between them."""

from __future__ import annotations

from collections.abc import Iterator

from rl_cluster.config.planning.machine import GIB, Machine
from rl_cluster.config.planning.model_shape import find_shape
from rl_cluster.config.planning.placement import num_gpus_needed
from rl_cluster.config.reading.problems import Problem
from rl_cluster.config.run import RunConfig

ELSEWHERE = "cluster.num_nodes, num_cpus_per_node and num_gpus_per_node describe other machines"


def on_cpu(config: RunConfig, machine: Machine) -> bool:
    device = config.cluster.device
    return device == "cpu" or (device == "auto" and machine.gpus == 0)


def device_exists(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if config.cluster.device == "cuda" and machine.gpus == 0:
        reason = "no NVIDIA GPU answers on this machine"
        yield Problem("cluster.device", "cuda", reason, f"Use auto or cpu; {ELSEWHERE}.")


def cores_suffice(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Engines and learner take turns on CPUs, so each role is held against the cores by itself."""
    if not on_cpu(config, machine):
        return
    each = config.cluster.cpus_per_worker or 1
    cores = machine.total_cores
    roles = {"rollout.num_workers": config.rollout.num_workers, "learner.num_ranks": config.learner.num_ranks}
    for field, count in roles.items():
        if count * each > cores:
            with_each = f" with {each} cores each (cluster.cpus_per_worker)" if each > 1 else ""
            reason = f"{count} workers{with_each} need more than the {cores} cores there are"
            yield Problem(field, count, reason, f"Give at most {max(1, cores // each)}; {ELSEWHERE}.")


def memory_suffices(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if not on_cpu(config, machine) or config.cluster.backend == "local":
        return
    per_node = -(-config.rollout.num_workers // machine.num_nodes)
    total = config.rollout.kv_cache_gib * per_node
    if total * GIB > machine.memory:
        reason = f"times {per_node} engines is more than the machine's {machine.memory / GIB:.1f} GiB"
        yield Problem("rollout.kv_cache_gib", config.rollout.kv_cache_gib, reason, "Lower it.")


def only_on_gpus(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if not on_cpu(config, machine):
        return
    tensor_parallel = config.rollout.tensor_parallel_size
    if tensor_parallel > 1:
        reason = "engines on CPUs are not split"
        yield Problem(
            "rollout.tensor_parallel_size", tensor_parallel, reason, "Set it to 1; use more workers."
        )
    if config.cluster.colocate:
        reason = "shares GPUs between learner and engine, and there is none"
        yield Problem("cluster.colocate", True, reason, "Set it to false; on CPUs they take turns anyway.")
    if config.sync.backend in ("nccl", "ipc"):
        yield Problem(
            "sync.backend", config.sync.backend, "needs GPUs, and there is none", "Use auto or gloo."
        )
    if config.learner.offload_optimizer:
        reason = "moves optimizer states from a GPU to the CPU, and there is no GPU"
        yield Problem("learner.offload_optimizer", True, reason, "Set it to false.")


def gpus_suffice(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """cluster.backend = local uses one GPU for everything."""
    if on_cpu(config, machine) or machine.gpus == 0 or config.cluster.backend == "local":
        return
    tensor_parallel = config.rollout.tensor_parallel_size
    if tensor_parallel > machine.gpus:
        reason = f"is more than the {machine.gpus} GPUs of a machine"
        yield Problem(
            "rollout.tensor_parallel_size", tensor_parallel, reason, f"Give at most {machine.gpus}."
        )
        return
    needed, there = num_gpus_needed(config), machine.total_gpus
    if needed > there:
        reason = (
            f"rollout workers × tensor_parallel_size, learner ranks, reference and reward models together "
            f"need {needed} GPUs, and there are {there}"
        )
        remedy = f"Lower rollout.num_workers or learner.num_ranks, or set cluster.colocate=true; {ELSEWHERE}."
        yield Problem("rollout.num_workers", config.rollout.num_workers, reason, remedy)
    elif machine.gpus % tensor_parallel and needed + machine.num_nodes > there:
        reason = f"does not divide the {machine.gpus} GPUs of a machine, and an engine may not cross machines"
        yield Problem("rollout.tensor_parallel_size", tensor_parallel, reason, "Choose a divisor.")


def colocation_is_sound(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    cluster, backend = config.cluster, config.sync.backend
    if not cluster.colocate:
        if backend == "ipc" and not on_cpu(config, machine):
            reason = "works between processes on the same GPU only"
            yield Problem("sync.backend", "ipc", reason, "Set cluster.colocate=true, or use auto.")
        return
    if on_cpu(config, machine):
        return
    engines = config.rollout.num_workers * config.rollout.tensor_parallel_size
    if config.learner.num_ranks != engines:
        reason = (
            f"each learner rank shares the GPU of one engine rank (cluster.colocate); there are {engines}"
        )
        yield Problem("learner.num_ranks", config.learner.num_ranks, reason, f"Set it to {engines}.")
    if backend == "nccl":
        reason = "refuses two processes on one GPU, which cluster.colocate makes"
        yield Problem("sync.backend", "nccl", reason, "Use auto.")
    if config.asynchrony.max_policy_lag > 0:
        reason = "overlaps generation and training, which take turns under cluster.colocate"
        remedy = "Set it to 0, or cluster.colocate=false."
        yield Problem("async.max_policy_lag", config.asynchrony.max_policy_lag, reason, remedy)


def offload_is_sound(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    learner = config.learner
    if learner.offload_optimizer and learner.zero_stage == 0 and not on_cpu(config, machine):
        reason = "needs ZeRO, and learner.zero_stage = 0 is without"
        yield Problem("learner.offload_optimizer", True, reason, "Set learner.zero_stage to 1, 2 or 3.")


def heads_divide(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    tensor_parallel = config.rollout.tensor_parallel_size
    if tensor_parallel == 1 or config.model.path is None:
        return
    shape = find_shape(config.model)
    if shape is not None and shape.is_its_own and shape.num_heads % tensor_parallel:
        reason = f"does not divide the model's {shape.num_heads} attention heads"
        yield Problem("rollout.tensor_parallel_size", tensor_parallel, reason, "Choose a divisor of them.")


CLUSTER_CHECKS = (
    device_exists,
    cores_suffice,
    memory_suffices,
    only_on_gpus,
    gpus_suffice,
    colocation_is_sound,
    offload_is_sound,
    heads_divide,
)
