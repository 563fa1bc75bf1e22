"""The experience buffer: finished groups in (from the producer), batches out (to the loop).

It decides how far generation may run ahead: it admits (version + 1 + max_policy_lag) × groups_per_step groups
in all, and with a lag of 0 that is synchronous training. What was done with each group is the ledger's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rl_cluster.errors import NoSignalError
from rl_cluster.loop.ledger import GroupState, Ledger
from rl_cluster.protocols import Ref
from rl_cluster.trajectory import GroupSummary, Scores


@dataclass(frozen=True)
class StageTimes:
    """Seconds on the loop's clock at which a group was begun, generated, scored, and given a reference."""

    begun: float
    generated: float
    scored: float
    referenced: float


@dataclass(frozen=True)
class ReadyGroup:
    """A group with all that training needs. reference: a Ref of float32 [T], or None."""

    summary: GroupSummary
    group: Ref
    reference: Ref | None
    scores: tuple[Scores, ...]
    times: StageTimes


class ExperienceBuffer:
    """Admission by policy lag, and batches in which no token is older than max_policy_lag updates."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        groups_per_step: int,
        max_policy_lag: int,
        last_version: int,
        version: int = 0,
        drop_limit: int = 10,
    ) -> None:
        """last_version: the version after the run's last update; nothing is admitted beyond it.
        drop_limit: batches' worth of dropped groups in a row that end the run."""
        self.version = version
        self._last_version = last_version
        self._ledger = ledger
        self._groups_per_step = groups_per_step
        self._max_policy_lag = max_policy_lag
        self._drop_limit = drop_limit * groups_per_step
        self._admitted = version * groups_per_step
        self._open: dict[int, int] = {}  # admitted and not yet in a batch: group id -> version at admission
        self._ready: dict[int, ReadyGroup] = {}
        self._drops_in_a_row = 0
        self._last_drop = ""
        self._changed = asyncio.Condition()

    def free_slots(self) -> int:
        """How many more groups may be begun under the current weights."""
        updates = min(self.version + 1 + self._max_policy_lag, self._last_version)
        return updates * self._groups_per_step - self._admitted

    async def wait_for_slot(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.free_slots() >= 1)

    def admit(self, group_id: int) -> None:
        assert self.free_slots() >= 1
        self._admitted += 1
        self._open[group_id] = self.version
        self._ledger.move(group_id, GroupState.IN_FLIGHT, self.version)

    async def put(self, ready: ReadyGroup) -> None:
        group_id = ready.summary.group_id
        self._ledger.move(group_id, GroupState.READY, self._open[group_id])
        self._drops_in_a_row = 0
        async with self._changed:
            self._ready[group_id] = ready
            self._changed.notify_all()

    async def drop(self, group_id: int, reason: str) -> None:
        """Give the group's slot to a fresh one. Raises NoSignalError when nothing else happens any more."""
        self._ledger.move(group_id, GroupState.DROPPED, self._open.pop(group_id), reason)
        self._drops_in_a_row += 1
        self._last_drop = reason
        if self._drops_in_a_row >= self._drop_limit:
            raise NoSignalError(
                f"{self._drops_in_a_row} groups in a row were dropped, the last because: {self._last_drop}. "
                "Make the task easier or harder, raise batch.samples_per_prompt or rollout.temperature, or "
                "set batch.dynamic_sampling: false."
            )
        async with self._changed:
            self._admitted -= 1
            self._changed.notify_all()

    def _next_batch(self) -> list[int]:
        """The groups_per_step ready groups that were admitted first; [] while there are too few, or while
        what they leave open is more than the updates to come can take in time."""
        chosen = sorted(self._ready, key=lambda g: (self._open[g], g))[: self._groups_per_step]
        if len(chosen) < self._groups_per_step:
            return []
        left = sorted(self._open[g] for g in self._open.keys() - set(chosen))
        for place, begun in enumerate(left):
            # At best the later updates take what is left in this order, groups_per_step at a time.
            trained_at = self.version + 1 + place // self._groups_per_step
            if trained_at > begun + self._max_policy_lag:
                return []
        return chosen

    async def take_batch(self) -> list[ReadyGroup]:
        """Wait for groups_per_step groups, those admitted first; sorted by group id.

        No token in them is older than max_policy_lag updates, and neither will any in later batches be.
        """
        async with self._changed:
            chosen = await self._changed.wait_for(self._next_batch)
        for group_id in chosen:
            self._ledger.move(group_id, GroupState.IN_BATCH, self._open.pop(group_id))
        return [self._ready.pop(group_id) for group_id in sorted(chosen)]

    async def trained(self, batch: list[ReadyGroup]) -> None:
        """The batch has changed the weights, and every engine serves them: open the next slots."""
        for ready in batch:
            self._ledger.move(ready.summary.group_id, GroupState.TRAINED, self.version)
        async with self._changed:
            self.version += 1
            self._changed.notify_all()
