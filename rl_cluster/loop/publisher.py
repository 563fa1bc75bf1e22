"""Carries the learner's weights into every engine, and proves it: implements protocols.WeightPublisher.

Sees handles only: a WeightSender (the learner) and WeightReceivers (rollout workers). Nothing that is large
passes through here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rl_cluster.errors import DeadlineError, WeightSyncError, WorkerDiedError
from rl_cluster.protocols import PublishReport
from rl_cluster.weights.channel import Channel
from rl_cluster.weights.wire import TensorMeta

PROBE_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.15}
"""Largest allowed mean |engine − learner| log-probability of the probe, by the engine's dtype; nats."""


class WeightSender(Protocol):
    """The learner. Its calls are collective over the ranks and take effect in order."""

    async def metadata(self) -> list[TensorMeta]: ...
    async def rendezvous(self) -> tuple[str, int, int]: ...
    async def open(self, channel: Channel) -> None: ...
    async def send(self, version: int, seconds: float) -> int: ...
    async def next_chunk(self, bucket_bytes: int) -> dict[str, Any] | None: ...
    async def adapter(self) -> Any: ...
    async def digests(self) -> dict[str, int]: ...
    async def probe(self, *sequences: np.ndarray) -> np.ndarray: ...


class WeightReceiver(Protocol):
    """A rollout worker. num_ranks: processes of its engine. Methods as those of actors.engine.Engine."""

    name: str
    num_ranks: int

    async def join(self, channel: Channel, rank_offset: int) -> None: ...
    async def receive(
        self, version: int, metadata: Sequence[TensorMeta], seconds: float, in_flight: bool
    ) -> float: ...
    async def begin_update(self, version: int, seconds: float, in_flight: bool) -> None: ...
    async def apply_chunk(self, chunk: dict[str, Any], seconds: float) -> None: ...
    async def finish_update(self, version: int, seconds: float) -> float: ...
    async def set_adapter(self, version: int, files: Any, seconds: float) -> float: ...
    async def loaded(self) -> list[dict[str, Any]]: ...
    async def prompt_logprobs(self, tokens: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class PublisherSpec:
    """backend: gloo, nccl or ipc; lora: publish adapters instead of weights. probe: sequences, int32 [P] each
    (or a single one), on whose log-probabilities both sides must agree; tolerance: see PROBE_TOLERANCE.
    prove: compare digests of what each engine loaded with the learner's; None: where both can tell."""

    backend: str
    bucket_bytes: int
    deadline_seconds: float
    probe: np.ndarray | tuple[np.ndarray, ...]
    tolerance: float
    in_flight: bool = True
    lora: bool = False
    prove: bool | None = None

    @property
    def probes(self) -> tuple[np.ndarray, ...]:
        return self.probe if isinstance(self.probe, tuple) else (self.probe,)


class EnginePublisher:
    """Keeps the channel between publications; it is opened anew when the receivers change or one failed."""

    def __init__(
        self, spec: PublisherSpec, sender: WeightSender, receivers: Sequence[WeightReceiver]
    ) -> None:
        self._spec = spec
        self._sender = sender
        self._receivers = tuple(receivers)
        self._metadata: list[TensorMeta] = []
        self._connected = False

    async def publish(self, version: int) -> PublishReport:
        """Every engine serves `version` and agrees with the learner on the probe when this returns.

        Raises DeadlineError or WorkerDiedError naming the workers that did not answer, WeightSyncError when
        weights arrived damaged or an engine disagrees. Engines without a complete update serve nothing.
        """
        begun = time.monotonic()
        if not self._connected:
            await self._connect()
        self._connected = False
        way = "lora" if self._spec.lora else self._spec.backend
        num_bytes, pauses = await _WAYS[way](self, version)
        await self._prove_loaded(version)
        await self._prove(version)
        self._connected = True
        return PublishReport(version, time.monotonic() - begun, max(pauses), num_bytes)

    async def _connect(self) -> None:
        self._metadata = await self._sender.metadata()
        if self._spec.lora:
            return
        meets = self._spec.backend != "ipc"
        host, port, generation = await self._sender.rendezvous() if meets else ("", 0, 0)
        channel = Channel(
            backend=self._spec.backend,
            host=host,
            port=port,
            generation=generation,
            world_size=1 + sum(receiver.num_ranks for receiver in self._receivers),
            packed_bytes=self._spec.bucket_bytes,
            timeout_seconds=self._spec.deadline_seconds,
        )
        offsets = np.cumsum([1, *(receiver.num_ranks for receiver in self._receivers)])
        joins = [r.join(channel, int(offset)) for r, offset in zip(self._receivers, offsets, strict=False)]
        opening = [self._sender.open(channel)] if meets else []
        await self._together("joining the weight channel", joins, opening)

    async def _broadcast(self, version: int) -> tuple[int, list[float]]:
        seconds = self._spec.deadline_seconds
        receives = [
            receiver.receive(version, self._metadata, seconds, self._spec.in_flight)
            for receiver in self._receivers
        ]
        doing = f"publishing version {version}"
        answers = await self._together(doing, receives, [self._sender.send(version, seconds)])
        return answers[-1], answers[:-1]

    async def _by_handles(self, version: int) -> tuple[int, list[float]]:
        seconds, doing = self._spec.deadline_seconds, f"publishing version {version}"
        begun = time.monotonic()
        await self._together(
            doing, [r.begin_update(version, seconds, self._spec.in_flight) for r in self._receivers]
        )
        num_bytes = 0
        while chunk := await self._sender.next_chunk(self._spec.bucket_bytes):
            num_bytes += sum(chunk["tensor_sizes"])
            await self._together(doing, [r.apply_chunk(chunk, seconds) for r in self._receivers])
        await self._together(doing, [r.finish_update(version, seconds) for r in self._receivers])
        return num_bytes, [time.monotonic() - begun]

    async def _adapters(self, version: int) -> tuple[int, list[float]]:
        files = await self._sender.adapter()
        seconds = self._spec.deadline_seconds
        sets = [receiver.set_adapter(version, files, seconds) for receiver in self._receivers]
        pauses = await self._together(f"publishing adapter {version}", sets)
        return sum(meta.num_bytes for meta in self._metadata), pauses

    async def _prove_loaded(self, version: int) -> None:
        """Every process of every engine has loaded, and serves, exactly the tensors that the learner sent."""
        able = hasattr(self._sender, "digests") and all(hasattr(r, "loaded") for r in self._receivers)
        if not (able if self._spec.prove is None else self._spec.prove):
            return
        answers = await self._together(
            f"proving version {version}", [r.loaded() for r in self._receivers], [self._sender.digests()]
        )
        sent = answers[-1]
        if sent.keys() != {meta.name for meta in self._metadata}:
            raise WeightSyncError(f"the learner did not send all of its weights with version {version}")
        for receiver, proofs in zip(self._receivers, answers, strict=False):
            problem = _problem(proofs, version, sent, 1 if self._spec.lora else receiver.num_ranks)
            if problem is not None:
                raise WeightSyncError(f"{receiver.name} does not serve version {version}: {problem}")

    async def _prove(self, version: int) -> None:
        """Learner and engines must agree on the log-probabilities of the probe."""
        probes = self._spec.probes
        answers = await self._together(
            f"probing version {version}",
            [_all_logprobs(receiver, probes) for receiver in self._receivers],
            [self._sender.probe(*probes)],
        )
        for receiver, found in zip(self._receivers, answers, strict=False):
            gap = float(np.abs(found - answers[-1]).mean())
            if not gap <= self._spec.tolerance:
                raise WeightSyncError(
                    f"{receiver.name} does not serve version {version}: its log-probabilities of the probe"
                    f" differ from the learner's by {gap:.3g} on average (allowed: {self._spec.tolerance:g})"
                )

    async def _together(
        self, doing: str, receivers: Sequence[Awaitable[Any]], sender: Sequence[Awaitable[Any]] = ()
    ) -> list[Any]:
        """All answers, receivers first; waits a little beyond the deadline, and says who is missing."""
        names = [receiver.name for receiver in self._receivers] + ["learner"]
        tasks = [asyncio.ensure_future(awaitable) for awaitable in [*receivers, *sender]]
        limit = self._spec.deadline_seconds * 1.1 + 1
        await asyncio.wait(tasks, timeout=limit)
        missing = [name for name, task in zip(names, tasks, strict=False) if not task.done()]
        for task in tasks:
            task.cancel()
        failed = {name: task.exception() for name, task in zip(names, tasks, strict=False) if task.done()}
        failed = {name: error for name, error in failed.items() if error is not None}
        dead = [name for name, error in failed.items() if isinstance(error, WorkerDiedError)]
        told = "; ".join(f"{name}: {error}" for name, error in failed.items())
        if dead:
            raise WorkerDiedError(", ".join(dead), f"while {doing}" + (f" ({told})" if told else ""))
        if missing:
            raise DeadlineError(
                f"{doing}: no answer from {', '.join(missing)} within {limit:g} s"
                + (f" ({told})" if told else "")
            )
        late = [error for error in failed.values() if isinstance(error, DeadlineError)]
        if failed:
            kind = DeadlineError if late else WeightSyncError
            raise kind(f"{doing} failed: {told}") from next(iter(failed.values()))
        return [task.result() for task in tasks]


async def _all_logprobs(receiver: WeightReceiver, probes: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(await asyncio.gather(*(receiver.prompt_logprobs(probe) for probe in probes)))


def _problem(proofs: Sequence[dict[str, Any]], version: int, sent: dict[str, int], ranks: int) -> str | None:
    """What the proofs of an engine's processes say against it; None: nothing."""
    if len(proofs) != ranks:
        return f"{len(proofs)} of its {ranks} processes tell what they loaded"
    for proof in proofs:
        loaded = proof["digests"]
        if proof["version"] != version:
            return f"what it loaded last was version {proof['version']}"
        if missing := sorted(sent.keys() - loaded.keys()):
            return f"{len(missing)} of {len(sent)} tensors were not loaded, {missing[0]} for one"
        if other := sorted(name for name in sent if loaded[name] != sent[name]):
            return f"{len(other)} of {len(sent)} tensors are not the learner's, {other[0]} for one"
        if proof["stale"]:
            return f"what it serves is not what it loaded: {', '.join(proof['stale'][:5])}"
    return None


_WAYS: dict[str, Callable[[EnginePublisher, int], Awaitable[tuple[int, list[float]]]]] = {
    "gloo": EnginePublisher._broadcast,
    "nccl": EnginePublisher._broadcast,
    "ipc": EnginePublisher._by_handles,
    "lora": EnginePublisher._adapters,
}
