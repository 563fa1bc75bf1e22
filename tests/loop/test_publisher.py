"""The publisher on fakes: who is missing is named, a dead worker comes first, no channel stays broken."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rl_cluster.errors import DeadlineError, WeightSyncError, WorkerDiedError
from rl_cluster.loop.publisher import EnginePublisher, PublisherSpec
from rl_cluster.weights.wire import TensorMeta

PROBE = np.array([3, 1, 4, 1], dtype=np.int32)


class Sender:
    """The learner; counts its rendezvous. fails: what a method raises."""

    def __init__(self) -> None:
        self.generation = 0
        self.sent = {"w": 5}
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

    async def digests(self) -> dict[str, int]:
        return dict(self.sent)

    async def probe(self, *sequences: np.ndarray) -> np.ndarray:
        self.probed = sequences
        return np.full(sum(len(tokens) - 1 for tokens in sequences), -1.0, dtype=np.float32)

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
        self.version = -1
        self.lies: dict[str, Any] = {}

    async def join(self, channel: Any, rank_offset: int) -> None:
        await self._maybe("join")

    async def receive(self, version: int, metadata: Any, seconds: float, in_flight: bool) -> float:
        await self._maybe("receive")
        self.version = version
        return 0.25

    async def loaded(self) -> list[dict[str, Any]]:
        await self._maybe("loaded")
        return [{"version": self.version, "digests": {"w": 5}, "stale": [], **self.lies}] * self.num_ranks

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
        ("loaded", "proving version 1"),
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


@pytest.mark.parametrize(
    ("lies", "told"),
    [
        ({"version": 0}, "what it loaded last was version 0"),
        ({"digests": {}}, "1 of 1 tensors were not loaded, w for one"),
        ({"digests": {"w": 6}}, "1 of 1 tensors are not the learner's, w for one"),
        ({"stale": ["model.layers.0"]}, r"what it serves is not what it loaded: model\.layers\.0"),
    ],
)
async def test_an_engine_that_passes_the_probe_with_other_weights_is_named(
    rig: Rig, lies: dict[str, Any], told: str
) -> None:
    rig.second.lies = lies
    with pytest.raises(WeightSyncError, match=f"rollout-1 does not serve version 1: {told}"):
        await rig.publisher.publish(1)


async def test_every_process_of_an_engine_must_tell_what_it_loaded(rig: Rig) -> None:
    rig.first.num_ranks = 0
    with pytest.raises(WeightSyncError, match="rollout-0 does not serve version 1"):
        rig.sender.open = lambda channel: asyncio.sleep(0)  # type: ignore[method-assign]
        rig.first.loaded = lambda: asyncio.sleep(0, [{}])  # type: ignore[assignment, method-assign]
        await rig.publisher.publish(1)


async def test_a_learner_that_sends_a_part_of_its_weights_is_found(rig: Rig) -> None:
    rig.sender.sent = {}
    with pytest.raises(WeightSyncError, match="did not send all of its weights with version 1"):
        await rig.publisher.publish(1)


async def test_all_sequences_of_the_probe_go_to_the_learner_in_one_pass(rig: Rig) -> None:
    spec = PublisherSpec("gloo", 1000, 0.05, (PROBE, PROBE[:2]), tolerance=1e-3, prove=True)
    publisher = EnginePublisher(spec, rig.sender, [rig.first, rig.second])  # type: ignore[list-item]
    await publisher.publish(1)
    assert [tokens.tolist() for tokens in rig.sender.probed] == [[3, 1, 4, 1], [3, 1]]
    rig.second.gap = 0.01
    with pytest.raises(WeightSyncError, match="rollout-1 does not serve version 2"):
        await publisher.publish(2)


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
