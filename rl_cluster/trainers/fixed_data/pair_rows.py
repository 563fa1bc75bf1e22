"""What a user calls preference data in, rows with the columns prompt, chosen and rejected out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_cluster.checks import check_texts
from rl_cluster.data.handed_over import read_rows
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fixed_data.preference_dataset import PreferenceDataset

NEEDED = ("chosen", "rejected")


def pair_rows(owner: str, data: Any) -> list[dict[str, Any]]:
    """data: a PreferenceDataset, a datasets.Dataset or list of {prompt, chosen, rejected}, a dict of lists.

    Raises BadInputError, owner being whose argument it is, for anything else, no rows, and missing columns.
    """
    if isinstance(data, PreferenceDataset):
        return [
            {"prompt": list(row.prompt), "chosen": list(row.chosen), "rejected": list(row.rejected)}
            for row in data.rows
        ]
    if isinstance(data, Mapping):
        missing = [name for name in ("prompt", *NEEDED) if name not in data and f"{name}s" not in data]
        if missing:
            raise BadInputError(f"{owner}: has no {missing[0]!r}; it has {sorted(map(str, data))}.")
        columns = [data.get(name, data.get(f"{name}s")) for name in ("prompt", *NEEDED)]
        return from_lists(owner, *columns)
    return table_rows(owner, data, NEEDED)


def from_lists(owner: str, prompts: Any, chosen: Any, rejected: Any) -> list[dict[str, Any]]:
    """Three lists of strings, equally long."""
    columns = {"prompts": prompts, "chosen": chosen, "rejected": rejected}
    for name, texts in columns.items():
        check_texts(f"{owner}.{name}", texts)
    if len({len(texts) for texts in columns.values()}) > 1:
        sizes = ", ".join(f"{len(texts)} {name}" for name, texts in columns.items())
        raise BadInputError(f"{owner}: {sizes}; give one chosen and one rejected response to each prompt.")
    return [
        {"prompt": prompt, "chosen": better, "rejected": worse}
        for prompt, better, worse in zip(prompts, chosen, rejected, strict=True)
    ]


def table_rows(owner: str, data: Any, needed: Sequence[str]) -> list[dict[str, Any]]:
    """As read_rows, of dicts that all have these columns."""
    return read_rows(data, owner, what=f"dicts with {', '.join(needed)}", needed=needed)
