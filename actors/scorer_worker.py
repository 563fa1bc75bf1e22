"""Ray workers that run Python scorers: groups in, Scores or ScoreFailures out; and how to start them."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from actors.scorer_handle import Limits, RayScorer
from rl_cluster.config.reward import FunctionScorer, ScorerConfig
from rl_cluster.rewards.calling import Outcome, score_groups, score_groups_async
from rl_cluster.rewards.loading import ScoreFunction, make_function
from rl_cluster.trajectory import TrajectoryGroup

ASYNC_CALLS_PER_WORKER = 64
"""Calls that an asynchronous function may be in at once."""


class ScorerWorker:
    """Runs a synchronous function, one call at a time, in its process's main thread (where SIGALRM works)."""

    def __init__(self, name: str, config: ScorerConfig, folder: str) -> None:
        self._name = name
        self._config = config
        self._folder = Path(folder)
        self._function: ScoreFunction | None = None

    def start(self) -> int:
        """Load the function; returns the process id. BadInputError as load_function."""
        self._function = make_function(self._config, self._folder)
        return os.getpid()

    def score(self, *groups: TrajectoryGroup) -> list[Outcome]:
        """One outcome per group, in order."""
        assert self._function is not None, "start() comes first"
        return score_groups(self._name, self._function, groups)


class AsyncScorerWorker:
    """Runs an asynchronous function, many calls at a time."""

    def __init__(self, name: str, config: ScorerConfig, folder: str) -> None:
        self._name = name
        self._config = config
        self._folder = Path(folder)
        self._function: ScoreFunction | None = None

    async def start(self) -> int:
        """As ScorerWorker.start."""
        self._function = make_function(self._config, self._folder)
        return os.getpid()

    async def score(self, *groups: TrajectoryGroup) -> list[Outcome]:
        """One outcome per group, in order."""
        assert self._function is not None, "start() comes first"
        return await score_groups_async(self._name, self._function, groups)


def make_function_scorer(
    config: ScorerConfig, name: str, *, num_cpus: float = 0.0, start_seconds: float = 600.0
) -> RayScorer:
    """A scorer of any kind but reward_model, not started yet.

    name: as from scorer_names. The function is loaded here first, so that BadInputError comes before any
    worker starts; relative paths and modules are looked up from this process's folder, on every machine.
    num_cpus: what each worker reserves of Ray's CPUs.
    """
    folder = Path.cwd()
    is_async = inspect.iscoroutinefunction(make_function(config, folder))
    calls = ASYNC_CALLS_PER_WORKER if is_async else 1
    actor = ray.remote(AsyncScorerWorker if is_async else ScorerWorker)
    options: dict[str, Any] = {"num_cpus": num_cpus, "max_concurrency": calls}

    def make_worker(worker_name: str) -> Any:
        del worker_name  # Ray's own names must be unique in a cluster; ours need not be
        return actor.options(**options).remote(name, config, str(folder))

    limits = Limits(config.timeout_seconds, calls_per_worker=calls, start_seconds=start_seconds)
    if isinstance(config, FunctionScorer):
        limits = replace(limits, num_workers=config.num_workers, groups_per_call=config.groups_per_call)
    return RayScorer(name, config.weight, make_worker, limits)
