"""The Ray actor that holds one learner rank, and the handle by which the driver calls it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import ray

from learners.handles import Call
from learners.spec import LearnerSpec
from rl_cluster.errors import DeadlineError
from rl_cluster.protocols import Ref
from rl_cluster.ray_answers import answer


class LearnerActor:
    """Runs in its own process; `start` comes after every rank has said that it is `ready`."""

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int) -> None:
        self._spec, self._index, self._world_size = spec, rank, world_size
        self._rank: Any = None
        self._store: Any = None

    def ready(self) -> tuple[str, int]:
        """Where the ranks can meet: this node's address and, on rank 0, the port of a store that is open
        from now on, so that nobody else can take the port before they do. Imports the heavy libraries."""
        import torch.distributed as dist

        import learners.rank

        if self._spec.engine == "deepspeed":
            import learners.engine_deepspeed  # noqa: F401

        if self._index == 0:
            self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return ray.util.get_node_ip_address(), self._store.port if self._store else 0

    def start(self, address: str, port: int) -> None:
        """Join the other ranks and load the model. Raises DeadlineError if they do not come."""
        import torch.distributed as dist

        from learners.rank import LearnerRank

        spec = self._spec
        os.environ.update(
            RANK=str(self._index),
            WORLD_SIZE=str(self._world_size),
            LOCAL_RANK="0",
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )
        timeout = timedelta(seconds=spec.deadline_seconds)
        try:
            if self._store is None:
                self._store = dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)
            dist.init_process_group(
                "nccl" if spec.device == "cuda" else "gloo",
                store=self._store,
                rank=self._index,
                world_size=self._world_size,
                timeout=timeout,
            )
        except dist.DistError as error:
            raise DeadlineError(
                f"learner rank {self._index} of {self._world_size} did not meet the others at "
                f"{address}:{port} within learner.deadline_seconds={spec.deadline_seconds:g}: {error}"
            ) from error
        self._rank = LearnerRank(spec, self._index, self._world_size)

    def call(self, method: str, *args: Any) -> Any:
        """LearnerRank.method(*args)."""
        assert self._rank is not None, "start first"
        return getattr(self._rank, method)(*args)


class RayRank:
    """A rank in another process. Refs are Ray's ObjectRefs; they are resolved as top-level arguments."""

    def __init__(self, actor: Any, name: str) -> None:
        self.name = name
        self.actor = actor

    def submit(self, method: str, *args: Any, returns: int = 1) -> Call:
        refs = self.actor.call.options(num_returns=returns).remote(method, *args)
        first, *others = refs if returns > 1 else [refs]
        return Call(self.name, answer(self.name, first), tuple(others))

    def put(self, value: Any) -> Ref:
        return ray.put(value)

    def close(self) -> None:
        ray.kill(self.actor)
