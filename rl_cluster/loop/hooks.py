"""Who may look on and steer between steps: facts of a step go in, wishes come out.

Hooks run on the loop's thread, in the order given, and must be quick. An error that one raises ends the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Wishes:
    """What hooks ask of the loop after a step; one hook's wish is enough."""

    stop: bool = False
    save: bool = False
    evaluate: bool = False

    def __or__(self, other: Wishes) -> Wishes:
        return Wishes(self.stop or other.stop, self.save or other.save, self.evaluate or other.evaluate)


class Hooks(Protocol):
    """step: counted from 1, 0 before the first. metrics: as in metrics.jsonl. folder: the run folder."""

    def on_begin(self, step: int, last_step: int, folder: Path) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> Wishes:
        """After an update, before the evaluation and the checkpoint that are due then."""
        ...

    def on_evaluate(self, step: int, metrics: Mapping[str, float | None]) -> Wishes: ...

    def on_save(self, step: int, checkpoint: Path) -> Path | None:
        """A checkpoint of this run that is to be kept, whatever else is deleted now; None: no wish."""
        ...

    def on_end(self, step: int) -> None: ...


def all_wishes(wishes: Iterable[Wishes]) -> Wishes:
    """The union."""
    total = Wishes()
    for wish in wishes:
        total |= wish
    return total
