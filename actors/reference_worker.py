"""The frozen reference policy as a Ray actor: groups in, log-probabilities of their tokens out.

Ref of a TrajectoryGroup → Ref of float32 [T], its trajectories laid end to end, 0 where not an action.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from actors.reference_model import ReferenceModel, ReferenceSpec
from rl_cluster.protocols import Ref
from rl_cluster.ray_answers import CONTROL_SECONDS, answer
from rl_cluster.trajectory import TrajectoryGroup


class ReferenceActor:
    """Runs in its own process, one group at a time."""

    def __init__(self, spec: ReferenceSpec) -> None:
        self._spec = spec
        self._model: Any = None

    def start(self) -> int:
        """Load the model; returns the process id. Raises BadInputError when there is none."""
        self._model = ReferenceModel(self._spec)
        return os.getpid()

    def logprobs(self, group: TrajectoryGroup) -> tuple[None, np.ndarray]:
        """The None is what the driver waits for, so that the array need not travel to it."""
        return None, self._model.logprobs(group)

    def checksum(self) -> str:
        return str(self._model.checksum())


class ReferenceHandle:
    """Implements protocols.Reference on the driver's side; groups are answered in order."""

    def __init__(self, name: str, actor: Any, deadline_seconds: float) -> None:
        self.name = name
        self._actor = actor
        self._deadline_seconds = deadline_seconds

    async def start(self) -> int:
        """The caller waits for it under a deadline of its own."""
        result: int = await answer(self.name, self._actor.start.remote())
        return result

    async def logprobs(self, group: Ref) -> Ref:
        done, result = self._actor.logprobs.options(num_returns=2).remote(group)
        doing = "a group's reference log-probabilities"
        await answer(self.name, done, doing, self._deadline_seconds)
        return result

    async def checksum(self) -> str:
        result: str = await answer(self.name, self._actor.checksum.remote(), "its checksum", CONTROL_SECONDS)
        return result

    def close(self) -> None:
        ray.kill(self._actor)


def create_reference_worker(
    name: str, spec: ReferenceSpec, options: Mapping[str, Any] | None = None
) -> ReferenceHandle:
    """Place the actor; `start` it afterwards. options: for Ray."""
    settings: dict[str, Any] = {
        "num_cpus": spec.num_threads,
        "num_gpus": 1 if spec.device == "cuda" else 0,
        "runtime_env": {"env_vars": spec.environment},
    }
    actor = ray.remote(ReferenceActor).options(**settings | dict(options or {})).remote(spec)
    return ReferenceHandle(name, actor, spec.deadline_seconds)
