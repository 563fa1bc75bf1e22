"""The publisher on fakes: who is missing is named, a dead worker comes first, no channel stays broken."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rl_cluster.errors import DeadlineError, WeightSyncError, WorkerDiedError
from rl_cluster.loop.publisher import EnginePublisher, PublisherSpec
from rl_cluster.weight_wire import TensorMeta

PROBE = np.array([3, 1, 4, 1], dtype=np.int32)


class Sender:
    """The learner; counts its rendezvous. fails: what a method raises."""

    def __init__(self) -> None:
        self.generation = 0
        self.fails: dict[str, Exception] = {}

    async def metadata(self) -> list[TensorMeta]:
        return [TensorMeta("w", "float32", (2, 3))]

    async def rendezvous(self) -> tuple[str, int, int]:
        self.generation += 1
        return "127.0.0.1", 1, self.generation

    async def open(self, channel: Any) -> None:
        assert channel.world_size == 3
        await self._maybe("open")

    async def send(self, version: int, seconds: float) -> int:
        await self._maybe("send")
        return 24

    async def probe(self, tokens: np.ndarray) -> np.ndarray:
        return np.full(len(tokens) - 1, -1.0, dtype=np.float32)

    async def _maybe(self, method: str) -> None:
        if method in self.fails:
            raise self.fails[method]


class Receiver:
    """Rollout worker. hangs: the methods that never answer; fails: what others raise; gap: of its probe."""

    num_ranks = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.hangs: set[str] = set()
        self.fails: dict[str, Exception] = {}
        self.gap = 0.0

    async def join(self, channel: Any, rank_offset: int) -> None:
        await self._maybe("join")

    async def receive(self, version: int, metadata: Any, seconds: float, in_flight: bool) -> float:
        await self._maybe("receive")
        return 0.25

    async def prompt_logprobs(self, tokens: np.ndarray) -> np.ndarray:
        await self._maybe("prompt_logprobs")
        return np.full(len(tokens) - 1, -1.0 - self.gap, dtype=np.float32)

    async def _maybe(self, method: str) -> None:
        if method in self.hangs:
            await asyncio.Event().wait()
        if method in self.fails:
            raise self.fails[method]


class Rig:
    def __init__(self) -> None:
        self.sender = Sender()
        self.first, self.second = Receiver("rollout-0"), Receiver("rollout-1")
        spec = PublisherSpec("gloo", 1000, 0.05, PROBE, tolerance=1e-3)
        self.publisher = EnginePublisher(spec, self.sender, [self.first, self.second])  # type: ignore[arg-type]


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_publication_reports_bytes_and_the_longest_pause_and_keeps_its_channel(rig: Rig) -> None:
    for version in (1, 2):
        report = await rig.publisher.publish(version)
        assert (report.version, report.num_bytes, report.pause_seconds) == (version, 24, 0.25)
    assert rig.sender.generation == 1


@pytest.mark.parametrize(
    ("method", "doing"),
    [
        ("join", "joining the weight channel"),
        ("receive", "publishing version 1"),
        ("prompt_logprobs", "probing version 1"),
    ],
)
async def test_a_rank_that_does_not_come_is_named_with_what_was_being_done(
    rig: Rig, method: str, doing: str
) -> None:
    rig.second.hangs = {method}
    with pytest.raises(DeadlineError, match=f"{doing}: no answer from rollout-1 within") as caught:
        await rig.publisher.publish(1)
    assert "rollout-0" not in str(caught.value)


async def test_the_missing_rank_is_named_although_the_learner_complains_first(rig: Rig) -> None:
    rig.second.hangs = {"join"}
    rig.sender.fails = {"open": DeadlineError("not all of the 2 weight receivers joined")}
    expected = r"no answer from rollout-1 .*\(learner: not all of the 2 weight receivers joined\)"
    with pytest.raises(DeadlineError, match=expected):
        await rig.publisher.publish(1)


async def test_a_dead_worker_is_the_cause_whatever_the_others_say(rig: Rig) -> None:
    rig.first.hangs = {"receive"}
    rig.second.fails = {"receive": WorkerDiedError("rollout-1", "killed")}
    rig.sender.fails = {"send": WeightSyncError("connection reset")}
    with pytest.raises(WorkerDiedError, match="rollout-1: while publishing version 1"):
        await rig.publisher.publish(1)


async def test_an_engine_that_answers_with_other_weights_is_named(rig: Rig) -> None:
    rig.second.gap = 0.01
    with pytest.raises(WeightSyncError, match=r"rollout-1 does not serve version 1: .* by 0\.01 on average"):
        await rig.publisher.publish(1)


async def test_an_engine_that_answers_nan_does_not_pass_the_probe(rig: Rig) -> None:
    rig.first.gap = float("nan")
    with pytest.raises(WeightSyncError, match="rollout-0 does not serve version 1"):
        await rig.publisher.publish(1)


async def test_after_a_failure_the_channel_is_opened_anew(rig: Rig) -> None:
    rig.first.fails = {"receive": WeightSyncError("bucket 1 arrived damaged")}
    with pytest.raises(WeightSyncError, match="rollout-0: bucket 1 arrived damaged"):
        await rig.publisher.publish(1)
    rig.first.fails = {}
    await rig.publisher.publish(1)
    assert rig.sender.generation == 2
