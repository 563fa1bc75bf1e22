"""The ledger: where every prompt group of the run is. Group ids in, states and counts out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class GroupState(StrEnum):
    IN_FLIGHT = "in_flight"
    READY = "ready"
    IN_BATCH = "in_batch"
    TRAINED = "trained"
    DROPPED = "dropped"


_NEXT = {
    None: {GroupState.IN_FLIGHT},
    GroupState.IN_FLIGHT: {GroupState.READY, GroupState.DROPPED},
    GroupState.READY: {GroupState.IN_BATCH, GroupState.DROPPED},
    GroupState.IN_BATCH: {GroupState.TRAINED},
    GroupState.TRAINED: set(),
    GroupState.DROPPED: set(),
}


@dataclass(frozen=True)
class LedgerEntry:
    """version: of the weights at admission, or, once trained, at the update. reason: of a drop."""

    state: GroupState
    version: int
    reason: str | None = None


class Ledger:
    """Every group once: admitted, in flight, ready, in a batch, then trained or dropped with a reason."""

    def __init__(self) -> None:
        self._entries: dict[int, LedgerEntry] = {}

    def move(self, group_id: int, state: GroupState, version: int, reason: str | None = None) -> None:
        """Record a transition; one that is not allowed is a bug in the loop, not bad luck."""
        before = self._entries.get(group_id)
        assert state in _NEXT[before.state if before else None], f"group {group_id}: {before} -> {state}"
        assert (reason is not None) == (state is GroupState.DROPPED), "a drop, and only a drop, has a reason"
        self._entries[group_id] = LedgerEntry(state, version, reason)

    def entry(self, group_id: int) -> LedgerEntry:
        return self._entries[group_id]

    def unfinished(self) -> list[int]:
        """Admitted groups that are neither trained nor dropped, in order."""
        done = (GroupState.TRAINED, GroupState.DROPPED)
        return sorted(g for g, entry in self._entries.items() if entry.state not in done)

    def counts(self) -> Counter[str]:
        return Counter(str(entry.state) for entry in self._entries.values())

    def to_json(self) -> dict[str, Any]:
        return {str(g): [str(e.state), e.version, e.reason] for g, e in sorted(self._entries.items())}

    @staticmethod
    def from_json(rows: Mapping[str, Iterable[Any]]) -> Ledger:
        """Only the finished groups: the others are admitted again after a resume."""
        ledger = Ledger()
        for group_id, (state, version, reason) in rows.items():
            if state in (GroupState.TRAINED, GroupState.DROPPED):
                ledger._entries[int(group_id)] = LedgerEntry(GroupState(state), version, reason)
        return ledger
