"""A LearnerSpec becomes a running LearnerGroup: actors on Ray, or one rank in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from learners.group import LearnerGroup
from learners.handles import Call, LocalRank, answers
from learners.spec import LearnerSpec


def start_local_learner(spec: LearnerSpec, name: str = "learner-0") -> LearnerGroup:
    """One rank in this process, on engine_torch, without Ray: for small models, notebooks and tests."""
    from learners.rank import LearnerRank

    assert spec.engine == "torch", "DeepSpeed needs processes of its own"
    return LearnerGroup(spec, [LocalRank(LearnerRank(spec), name)])


async def start_ray_learner(
    spec: LearnerSpec,
    num_ranks: int,
    *,
    name: str = "learner",
    options: Sequence[Mapping[str, Any]] | None = None,
    env_vars: Mapping[str, str] | None = None,
) -> LearnerGroup:
    """One Ray actor per rank; Ray must be running. The ranks are named NAME-0, NAME-1, …

    options: per rank, for `ray.remote` (num_cpus, num_gpus, scheduling_strategy…); default one CPU each.
    env_vars: added to the actors' environment. Raises DeadlineError that names the ranks that did not come
    up within start_deadline_seconds, WorkerDiedError where one died; the actors are then ended.
    """
    import ray

    from learners.actor import LearnerActor, RayRank
    from rl_cluster.ray_answers import answer

    options = options or [{"num_cpus": 1}] * num_ranks
    assert len(options) == num_ranks
    remote_class = ray.remote(LearnerActor)
    ranks = []
    for index in range(num_ranks):
        settings = {**options[index], "runtime_env": {"env_vars": _environment(spec) | dict(env_vars or {})}}
        ranks.append(
            RayRank(remote_class.options(**settings).remote(spec, index, num_ranks), f"{name}-{index}")
        )
    group = LearnerGroup(spec, ranks)
    try:
        ready = [Call(rank.name, answer(rank.name, rank.actor.ready.remote()), ()) for rank in ranks]
        address, port = (await answers(ready, f"{name} start", spec.start_deadline_seconds))[0]
        started = [
            Call(rank.name, answer(rank.name, rank.actor.start.remote(address, port)), ()) for rank in ranks
        ]
        await answers(started, f"{name} rendezvous", spec.start_deadline_seconds)
    except BaseException:
        group.close()
        raise
    return group


def _environment(spec: LearnerSpec) -> dict[str, str]:
    """Threads must be limited before PyTorch is imported; DeepSpeed must not look for another accelerator."""
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if spec.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(spec.num_threads)
    if spec.device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    return environment
