"""The experience buffer under every order of completions, drops and resumes: never stuck, never too old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_cluster.loop.buffer import ExperienceBuffer, ReadyGroup, StageTimes
from rl_cluster.loop.ledger import Ledger
from rl_cluster.loop.state import LoopState, newest_checkpoint
from rl_cluster.trajectory import GroupSummary
from tests.fakes import FakeRolloutWorker
from tests.loop.test_loop import Rig, make_config

TIMES = StageTimes(0.0, 0.0, 0.0, 0.0)


def ready(group_id: int, version: int) -> ReadyGroup:
    summary = GroupSummary(group_id, "row", (2,), (1,), (True,), (False,), version, version, "rollout-0", 0.0)
    return ReadyGroup(summary, object(), None, (), TIMES)


class Run:
    """A loop around the buffer whose engines do what `choose` says. choose(n): a number below n."""

    def __init__(self, lag: int, groups_per_step: int, steps: int, choose: Callable[[int], int]) -> None:
        self.lag, self.size, self.steps, self.choose = lag, groups_per_step, steps, choose
        self.ledger = Ledger()
        self.next_group = 0
        self.trained: list[int] = []
        self.dropped: list[int] = []
        self._restart(0, [])

    def _restart(self, version: int, reissue: list[int]) -> None:
        self.buffer = ExperienceBuffer(
            self.ledger,
            groups_per_step=self.size,
            max_policy_lag=self.lag,
            last_version=self.steps,
            version=version,
            drop_limit=10**6,
        )
        self.reissue = reissue
        self.in_flight: dict[int, int] = {}  # group -> version of the engine at its first token

    def _admit(self) -> None:
        while self.buffer.free_slots() >= 1:
            group = self.reissue.pop(0) if self.reissue else self.next_group
            self.next_group = max(self.next_group, group + 1)
            self.buffer.admit(group)
            self.in_flight[group] = self.buffer.version

    def _resume(self) -> None:
        """As after a crash now: the ledger as JSON, the unfinished groups again."""
        unfinished = sorted({*self.ledger.unfinished(), *self.reissue})
        self.ledger = Ledger.from_json(self.ledger.to_json())
        self._restart(self.buffer.version, unfinished)

    async def to_the_end(self) -> None:
        while self.buffer.version < self.steps:
            taking = asyncio.ensure_future(self.buffer.take_batch())
            if not await self._generate_until(taking):
                continue
            batch = taking.result()
            assert len(batch) == self.size
            assert all(self.buffer.version - group.summary.min_version <= self.lag for group in batch)
            await self._some_completions()
            self.trained += [group.summary.group_id for group in batch]
            await self.buffer.trained(batch)

    async def _generate_until(self, taking: asyncio.Future[list[ReadyGroup]]) -> bool:
        """False: the run was resumed meanwhile."""
        while True:
            self._admit()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if taking.done():
                return True
            assert self.in_flight, "every admitted group is ready, and there is no batch"
            if self.choose(25) == 24:
                taking.cancel()
                self._resume()
                return False
            await self._complete_one()

    async def _some_completions(self) -> None:
        """While the learner works, generation goes on."""
        for _ in range(self.choose(2 * self.size + 1)):
            self._admit()
            if self.in_flight:
                await self._complete_one()

    async def _complete_one(self) -> None:
        group = sorted(self.in_flight)[self.choose(len(self.in_flight))]
        version = self.in_flight.pop(group)
        if self.choose(8) == 7:
            self.dropped.append(group)
            await self.buffer.drop(group, "a reason")
        else:
            await self.buffer.put(ready(group, version))


def check(run: Run) -> None:
    asyncio.run(run.to_the_end())
    assert len(run.trained) == run.steps * run.size
    assert len(set(run.trained)) == len(run.trained), "a group was trained twice"
    assert not set(run.trained) & set(run.dropped)
    # What is neither trained nor dropped was still under way at the end: no group was lost.
    assert {*run.trained, *run.dropped, *run.ledger.unfinished()} == set(range(run.next_group))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 5), st.integers(1, 5), st.integers(1, 8), st.data())
def test_no_order_of_events_makes_a_batch_late_stuck_or_wrong(
    lag: int, groups_per_step: int, steps: int, data: st.DataObject
) -> None:
    check(Run(lag, groups_per_step, steps, lambda n: data.draw(st.integers(0, n - 1))))


@pytest.mark.parametrize("lag", range(6))
def test_random_orders_of_completion_reach_the_end_at_every_lag(lag: int) -> None:
    for seed in range(60):
        generator = np.random.default_rng([lag, seed])
        check(Run(lag, 4, 12, lambda n, generator=generator: int(generator.integers(n))))


async def test_a_batch_waits_for_an_old_group_only_when_it_must() -> None:
    """Two per step, lag 2: six groups of version 0, of which the slowest may come last of all."""
    run = Run(2, 2, 10, lambda n: 0)
    run._admit()
    assert sorted(run.in_flight) == [0, 1, 2, 3, 4, 5]
    for group in (5, 4, 3, 2):
        await run.buffer.put(ready(group, 0))
    assert [group.summary.group_id for group in await run.buffer.take_batch()] == [2, 3]
    await run.buffer.trained([])
    assert [group.summary.group_id for group in await run.buffer.take_batch()] == [4, 5]
    await run.buffer.trained([])
    run._admit()
    for group in (6, 7, 8, 9):
        await run.buffer.put(ready(group, run.in_flight[group]))
    waiting = asyncio.ensure_future(run.buffer.take_batch())
    await asyncio.sleep(0)
    assert not waiting.done(), "groups 0 and 1 would be older than two updates in the next batch"
    for group in (1, 0):
        await run.buffer.put(ready(group, 0))
    assert [group.summary.group_id for group in await waiting] == [0, 1]


@pytest.mark.parametrize("lag", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_whole_runs_with_random_delays_keep_to_the_lag_and_resume(
    tmp_path: Path, lag: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)

    def worker() -> FakeRolloutWorker:
        return FakeRolloutWorker(delay=lambda _: int(generator.integers(1, 60)))

    config = make_config(run={"steps": 9}, checkpoint={"every": 4}, **{"async": {"max_policy_lag": lag}})
    first = Rig(config, tmp_path, workers=[worker()])
    first.run()
    assert sorted(first.learner.trained_groups) == list(range(36))
    state = LoopState.read(newest_checkpoint(tmp_path / "checkpoints").with_name("step-8"))
    again = Rig(config, tmp_path / "again", workers=[worker()], resume=state)
    again.run()
    assert sorted(again.loop.ledger.counts().items()) == [("trained", 36)]
    for rig in (first, again):
        assert all(row["async/lag_max"] <= lag for step, row in rig.observer.rows.items() if step > 0)
