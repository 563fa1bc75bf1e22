"""The Ray actor that holds one learner rank, and the handle by which the driver calls it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from learners.handles import Call
from learners.spec import LearnerSpec
from rl_cluster.errors import RLClusterError, WorkerDiedError
from rl_cluster.protocols import Ref


class LearnerActor:
    """Runs in its own process; `start` comes after every rank has said that it is `ready`."""

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int) -> None:
        self._spec, self._index, self._world_size = spec, rank, world_size
        self._rank: Any = None

    def ready(self) -> tuple[str, int]:
        """This node's address and a port that is free on it. Imports the heavy libraries on the way."""
        import learners.rank

        if self._spec.engine == "deepspeed":
            import learners.engine_deepspeed  # noqa: F401

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(self, address: str, port: int) -> None:
        """Join the process group of all ranks and load the model."""
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
        dist.init_process_group(
            "nccl" if spec.device == "cuda" else "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=self._index,
            world_size=self._world_size,
            timeout=timedelta(seconds=spec.deadline_seconds),
        )
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
        return Call(self.name, self.answer(first), tuple(others))

    async def answer(self, ref: Any) -> Any:
        """The value; raises the worker's own error, or WorkerDiedError with the worker's name."""
        try:
            return await ref
        except RayActorError as error:
            raise WorkerDiedError(self.name, str(error)) from error
        except RayTaskError as error:
            if isinstance(error.cause, RLClusterError):
                raise error.cause from error
            raise
        except RayError as error:
            raise WorkerDiedError(self.name, f"{type(error).__name__}: {error}") from error

    def put(self, value: Any) -> Ref:
        return ray.put(value)

    def close(self) -> None:
        ray.kill(self.actor)
