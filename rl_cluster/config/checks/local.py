"""Checks of cluster.backend = local: one process, one rank, one sampler that is the learner's own model."""

from __future__ import annotations

from collections.abc import Iterator

from rl_cluster.config.planning.machine import Machine
from rl_cluster.config.reading.problems import Problem
from rl_cluster.config.run import RunConfig

OR_RAY = "or cluster.backend=ray"


def local_is_one_process(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """learner.zero_stage has nothing to shard and is without effect."""
    if config.cluster.backend != "local":
        return
    ones = {
        "learner.num_ranks": config.learner.num_ranks,
        "rollout.num_workers": config.rollout.num_workers,
        "rollout.tensor_parallel_size": config.rollout.tensor_parallel_size,
        "cluster.num_nodes": config.cluster.num_nodes,
    }
    for field, value in ones.items():
        if value > 1:
            yield Problem(field, value, "cluster.backend = local is one process", f"Set it to 1, {OR_RAY}.")
    if config.asynchrony.max_policy_lag > 0:
        reason = "learner and sampler are the same model (cluster.backend = local) and cannot work at once"
        remedy = f"Set it to 0, {OR_RAY}."
        yield Problem("async.max_policy_lag", config.asynchrony.max_policy_lag, reason, remedy)
    if config.cluster.colocate:
        reason = "lets processes share a GPU, and cluster.backend = local is one process"
        yield Problem("cluster.colocate", True, reason, f"Set it to false, {OR_RAY}.")
    if config.learner.offload_optimizer:
        reason = "is DeepSpeed's, which cluster.backend = local is without"
        yield Problem("learner.offload_optimizer", True, reason, f"Set it to false, {OR_RAY}.")
    if config.sync.backend != "auto":
        reason = "carries weights between processes, and cluster.backend = local is one"
        yield Problem("sync.backend", config.sync.backend, reason, f"Use auto, {OR_RAY}.")


LOCAL_CHECKS = (local_is_one_process,)
