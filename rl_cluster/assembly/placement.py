"""The plan's nodes and GPUs in Ray's terms: a WorkerPlan in, the options of its actor out."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_cluster.config.planning.fit_plan import FitPlan
from rl_cluster.config.planning.placement import WorkerPlan
from rl_cluster.config.planning.plan import Plan
from rl_cluster.errors import BadInputError


class Nodes:
    """The cluster's living nodes, this one first. Raises BadInputError if the plan has more."""

    def __init__(self, plan: Plan | FitPlan) -> None:
        here = ray.get_runtime_context().get_node_id()
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        self._ids = [here, *sorted(node for node in alive if node != here)]
        self._plan = plan
        if len(self._ids) < plan.machine.num_nodes:
            raise BadInputError(
                f"cluster.num_nodes = {plan.machine.num_nodes}: the Ray cluster has {len(self._ids)}. "
                "Start the other nodes (ray start --address=…), or set cluster.num_nodes."
            )

    def options(self, worker: WorkerPlan) -> dict[str, Any]:
        """For `actor.options(...)`: its node, CPUs and GPUs."""
        return {
            "num_cpus": worker.num_cpus,
            "num_gpus": worker.num_gpus,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._ids[worker.node], soft=False),
        }

    def reward_model_claims(self) -> dict[str, float]:
        """CPUs and GPUs of each reward-model worker."""
        workers = self._plan.of("reward_model")
        if not workers:
            return {}
        return {"num_cpus": workers[0].num_cpus, "num_gpus": workers[0].num_gpus}
