"""What would run, but hardly as intended: a config and its plan in, sentences for the user out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rl_cluster.config.planning.derive import Derived
from rl_cluster.config.planning.machine import GIB, Machine
from rl_cluster.config.planning.placement import WorkerPlan
from rl_cluster.config.run import RunConfig


def advise(
    config: RunConfig, machine: Machine, device: str, derived: Derived, workers: Sequence[WorkerPlan]
) -> tuple[str, ...]:
    """One sentence each, with the field that it is about."""
    return (
        *_about_batch(config, derived),
        *_about_algorithm(config, derived),
        *_about_cores(config, machine, device, workers),
        *_about_memory(machine, workers),
    )


def _about_batch(config: RunConfig, derived: Derived) -> Iterator[str]:
    longest = min(derived.max_prompt_tokens + config.rollout.max_new_tokens, derived.max_sequence_tokens)
    if config.batch.tokens_per_micro_batch < longest:
        yield (
            f"batch.tokens_per_micro_batch = {config.batch.tokens_per_micro_batch} is less than the longest "
            f"sequence ({longest} tokens): such sequences get a micro-batch of their own."
        )
    if config.learner.num_ranks > derived.sequences_per_update:
        yield (
            f"learner.num_ranks = {config.learner.num_ranks} is more than the {derived.sequences_per_update} "
            "sequences of an update: some ranks have nothing to do."
        )


def _about_algorithm(config: RunConfig, derived: Derived) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.loss.kind == "reinforce" and derived.updates_per_step > 1:
        yield (
            f"algorithm.loss.kind = reinforce has no importance ratio, and a step takes "
            f"{derived.updates_per_step} updates: all but the first are off-policy. Consider clip."
        )
    if algorithm.kl.coef > 0 and algorithm.kl.place == "loss" and algorithm.kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator = k1 in the loss has a gradient of mean zero: it does not hold the "
            "policy near the reference. Use k3 or k2 there."
        )


def _about_cores(
    config: RunConfig, machine: Machine, device: str, workers: Sequence[WorkerPlan]
) -> Iterator[str]:
    if device == "cuda" or config.asynchrony.max_policy_lag == 0:
        return
    busy = sum(worker.threads for worker in workers if worker.role in ("rollout", "learner", "critic"))
    if busy > machine.total_cores:
        yield (
            f"async: {busy} threads of engines and learner run at once on {machine.total_cores} cores, and "
            "will slow each other down. Take fewer workers, or async.max_policy_lag = 0."
        )


def _about_memory(machine: Machine, workers: Sequence[WorkerPlan]) -> Iterator[str]:
    for node in range(machine.num_nodes):
        sizes = [w.memory.total for w in workers if w.memory and not w.memory.on_gpu and w.node == node]
        if sum(sizes) > machine.memory:
            yield (
                f"memory: the workers need about {sum(sizes) / GIB:.1f} GiB, the machine has "
                f"{machine.memory / GIB:.1f}. Lower rollout.kv_cache_gib or batch.tokens_per_micro_batch."
            )
    first_of_role = {worker.role: worker for worker in reversed(workers)}
    for worker in first_of_role.values():
        if worker.memory and worker.memory.on_gpu and worker.memory.total > machine.gpu_memory:
            yield (
                f"memory: {worker.name} needs about {worker.memory.total / GIB:.1f} GiB of a GPU's "
                f"{machine.gpu_memory / GIB:.1f}. More learner.num_ranks, gradient checkpointing, a smaller "
                "batch.tokens_per_micro_batch or LoRA make it smaller."
            )
