"""What every source hands on: raw rows with the place they came from, and the rows that are no good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_cluster.errors import BadInputError

NUM_SHOWN = 5


@dataclass(frozen=True)
class Row:
    """One row before tokenisation.

    place: where a user finds it, `file:line` or `file: row n`. prompt: a string or a list of chat
    messages; nothing about it has been checked yet. metadata: the other columns.
    """

    place: str
    prompt: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why, in words for the user."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True)
class RawRows:
    """What a source gave: usable rows in their order, and those that could not even be read."""

    rows: tuple[Row, ...]
    bad: tuple[BadRow, ...] = ()


def list_bad_rows(bad: Sequence[BadRow]) -> str:
    """The first few bad rows, one per line, for an error message or a log."""
    lines = [f"  {row}" for row in bad[:NUM_SHOWN]]
    if len(bad) > NUM_SHOWN:
        lines.append(f"  … and {len(bad) - NUM_SHOWN} more")
    return "\n".join(lines)


def refuse_bad_rows(field: str, bad: Sequence[BadRow], num_rows: int, on_bad_row: str) -> None:
    """Raise BadInputError if there are bad rows and they are not to be skipped, or if nothing else is left.

    field: the setting that named the rows. num_rows: usable and bad rows together.
    """
    if bad and len(bad) == num_rows:
        raise BadInputError(f"{field}: none of the {num_rows} rows can be used:\n{list_bad_rows(bad)}")
    if bad and on_bad_row == "refuse":
        raise BadInputError(
            f"{field}: {len(bad)} of {num_rows} rows cannot be used:\n{list_bad_rows(bad)}\n"
            "Correct them, or set data.on_bad_row=skip to leave such rows out and count them."
        )
