"""The Ray actor that holds one vLLM engine, and the handle by which the driver uses it.

GroupTasks go in; trajectory groups come out, into Ray's object store, with a small summary for the driver.
New weights come in through the methods that the publisher calls.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.engine_spec import EngineSpec
from actors.episode import play_group
from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.errors import BadInputError, DeadlineError, WorkerDiedError
from rl_cluster.protocols import Ref
from rl_cluster.ray_answers import CONTROL_SECONDS, answer
from rl_cluster.trajectory import GroupSummary, GroupTask, TrajectoryGroup
from rl_cluster.weights.channel import Channel
from rl_cluster.weights.wire import TensorMeta


@dataclass(frozen=True)
class Progress:
    """Signs of life. tokens: generated since the start; running: requests; rss_bytes: actor and engine."""

    tokens: int
    running: int
    version: int
    rss_bytes: int


class RolloutActor:
    """An asyncio actor: many groups are in flight at once. Nothing heavy is imported before `start`."""

    def __init__(self, name: str, spec: EngineSpec) -> None:
        self._name, self._spec = name, spec
        self._engine: Any = None
        self._tokenizer: Any = None
        self._eos_token_ids: frozenset[int] = frozenset()
        self._environments: Any = None
        self._adapters = Path(tempfile.mkdtemp(prefix="rl-cluster-adapters-"))

    async def start(self) -> tuple[int, ...]:
        """Load the model; returns the process ids of actor and engine."""
        from actors.engine import Engine

        self._engine = await Engine.start(self._spec, self._name)
        self._tokenizer = self._engine.tokenizer
        self._eos_token_ids = self._engine.eos_token_ids
        return self.pids()

    async def rollout(self, task: GroupTask) -> tuple[GroupSummary, TrajectoryGroup]:
        """Play the task's episodes, each with its own seed. EpisodeError where an environment fails."""
        begun = time.monotonic()
        group = await play_group(
            self._engine,
            self._tokenizer,
            self._eos_token_ids,
            task,
            self._environments,
            self._spec.max_model_len - 1,
        )
        return group.summary(self._name, time.monotonic() - begun), group

    async def set_environment(self, factory: bytes, settings: EnvironmentConfig) -> None:
        """Play every episode in an environment from now on; after `start`. factory: a pickled f(tokenizer).

        Makes the first environment; BadInputError if that fails.
        """
        from rl_cluster.environments.playing.hosting import EnvironmentPool

        made = load_pickled(factory)
        environments = EnvironmentPool(made, self._tokenizer, settings, self._eos_token_ids)
        await environments.prepare()
        self._environments = environments

    async def call(self, method: str, *args: Any) -> Any:
        """Engine.method(*args): what the publisher and the supervisor use."""
        return await getattr(self._engine, method)(*args)

    async def set_adapter(self, version: int, files: Any, seconds: float) -> float:
        """Write a peft folder and serve it; returns the seconds that it took. The one before it is kept,
        for the requests that run with it."""
        begun = time.monotonic()
        folder = self._adapters / str(time.time_ns())
        folder.mkdir()
        (folder / "adapter_config.json").write_text(files.config)
        (folder / "adapter_model.safetensors").write_bytes(files.tensors)
        await self._engine.set_adapter(version, str(folder), seconds)
        for old in sorted(self._adapters.iterdir())[:-2]:
            shutil.rmtree(old)
        return time.monotonic() - begun

    async def progress(self) -> Progress:
        """Raises WorkerDiedError when the actor lives but its engine does not."""
        import psutil

        self._engine.check_alive()
        rss = sum(psutil.Process(pid).memory_info().rss for pid in self.pids() if psutil.pid_exists(pid))
        engine = self._engine
        return Progress(engine.generated_tokens, engine.running, engine.version, rss)

    def pids(self) -> tuple[int, ...]:
        """This process first, then its children (vLLM's engine core and workers)."""
        import psutil

        me = psutil.Process(os.getpid())
        return (me.pid, *(child.pid for child in me.children(recursive=True)))

    async def shutdown(self) -> None:
        """End vLLM's processes, so that none outlives the actor."""
        if self._environments is not None:
            self._environments.close()
        if self._engine is not None:
            self._engine.shutdown()
        shutil.rmtree(self._adapters, ignore_errors=True)


class RolloutHandle:
    """Implements protocols.RolloutWorker and the publisher's WeightReceiver on the driver's side."""

    def __init__(self, name: str, spec: EngineSpec, actor: Any) -> None:
        self.name = name
        self.spec = spec
        self.num_ranks = spec.tensor_parallel_size
        self._actor = actor
        self.pids: tuple[int, ...] = ()

    async def start(self, deadline_seconds: float) -> None:
        """Raises DeadlineError, or WorkerDiedError with the cause."""
        doing = "its start (cluster.start_deadline_seconds)"
        self.pids = await answer(self.name, self._actor.start.remote(), doing, deadline_seconds)

    async def set_environment(
        self, factory: Callable[[Any], Any], settings: EnvironmentConfig, deadline_seconds: float
    ) -> None:
        """See RolloutActor.set_environment. factory: shipped by value where it is of a notebook or script."""
        pickled = pickle_factory(factory)
        doing = "making its environment (cluster.start_deadline_seconds)"
        ready = self._actor.set_environment.remote(pickled, settings)
        await answer(self.name, ready, doing, deadline_seconds)

    async def rollout(self, task: GroupTask) -> tuple[GroupSummary, Ref]:
        summary, group = self._actor.rollout.options(num_returns=2).remote(task)
        return await answer(self.name, summary), group

    async def join(self, channel: Channel, rank_offset: int) -> None:
        await self._call("join", channel, rank_offset)

    async def receive(
        self, version: int, metadata: Sequence[TensorMeta], seconds: float, in_flight: bool
    ) -> float:
        result: float = await self._call("receive", version, metadata, seconds, in_flight)
        return result

    async def begin_update(self, version: int, seconds: float, in_flight: bool) -> None:
        await self._call("begin_update", version, seconds, in_flight)

    async def apply_chunk(self, chunk: dict[str, Any], seconds: float) -> None:
        await self._call("apply_chunk", chunk, seconds)

    async def finish_update(self, version: int, seconds: float) -> float:
        result: float = await self._call("finish_update", version, seconds)
        return result

    async def set_adapter(self, version: int, files: Any, seconds: float) -> float:
        result: float = await answer(self.name, self._actor.set_adapter.remote(version, files, seconds))
        return result

    async def loaded(self) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = await self._call("loaded")
        return result

    async def prompt_logprobs(self, tokens: np.ndarray) -> np.ndarray:
        values: np.ndarray = await self._call("prompt_logprobs", tokens.tolist())
        return values

    async def set_version(self, version: int) -> None:
        await self._control("set_version", version)

    async def sleep(self) -> None:
        await self._control("sleep")

    async def wake(self) -> None:
        await self._control("wake")

    async def progress(self) -> Progress:
        result: Progress = await answer(self.name, self._actor.progress.remote(), "progress", CONTROL_SECONDS)
        return result

    async def shutdown(self, deadline_seconds: float = 20.0) -> None:
        """End the engine, then the actor; an actor that is dead already is left in peace."""
        with suppress(DeadlineError, WorkerDiedError):
            await answer(self.name, self._actor.shutdown.remote(), "shutting down", deadline_seconds)
        ray.kill(self._actor)

    async def _call(self, method: str, *args: Any) -> Any:
        """Without a deadline: the publisher waits for all receivers together, and names those missing."""
        return await answer(self.name, self._actor.call.remote(method, *args))

    async def _control(self, method: str, *args: Any) -> None:
        await answer(self.name, self._actor.call.remote(method, *args), method, CONTROL_SECONDS)


def pickle_factory(factory: Callable[[Any], Any]) -> bytes:
    """BadInputError for one that cannot travel."""
    try:
        pickled: bytes = ray.cloudpickle.dumps(factory)
        return pickled
    except Exception as error:  # pickling calls the code of the user's objects, which raises what it likes
        raise BadInputError(
            f"rollout.environment: {factory!r:.80} cannot be sent to the rollout workers: "
            f"{type(error).__name__}: {error}. Make such things inside the factory."
        ) from error


def load_pickled(factory: bytes) -> Callable[[Any], Any]:
    """BadInputError where this machine lacks what the factory needs."""
    try:
        result: Callable[[Any], Any] = ray.cloudpickle.loads(factory)
        return result
    except Exception as error:  # unpickling imports the user's modules
        raise BadInputError(
            "rollout.environment: a rollout worker cannot load the factory: "
            f"{type(error).__name__}: {error}. Its modules must be importable there."
        ) from error


def create_rollout_worker(
    name: str, spec: EngineSpec, options: Mapping[str, Any] | None = None
) -> RolloutHandle:
    """Place the actor; `start` it afterwards. options: for Ray (scheduling_strategy, num_cpus…)."""
    settings: dict[str, Any] = {
        "num_cpus": spec.num_threads,
        "num_gpus": spec.num_gpus,
        "max_concurrency": 10_000,
        "runtime_env": {"env_vars": spec.environment},
    }
    actor = ray.remote(RolloutActor).options(**settings | dict(options or {})).remote(name, spec)
    return RolloutHandle(name, spec, actor)
