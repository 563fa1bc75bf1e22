"""What a scorer's function returned in; per group its Scores or a typed ScoreFailure out.

A row's answer may be a number or a dict of named numbers. The values of a dict are kept as components;
its score is the entry called "score" if there is one, else the sum of all entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np

from rl_cluster.rewards.safe_text import error_text, value_text
from rl_cluster.trajectory import ScoreFailure, Scores

Outcome = Scores | ScoreFailure

LARGEST_SCORE = float(np.finfo(np.float32).max)
"""Advantages are float32: a score beyond it would become infinite, or make all others vanish."""


def read_answer(
    name: str, answer: Any, sizes: Sequence[int], seconds: float, none_is_missing: bool = False
) -> list[Outcome]:
    """Check and split a function's answer for groups of these sizes.

    A wrong type or length spoils every group; a NaN, an infinity or a number beyond float32 only the group
    that it is in. seconds: wall time of the call, shared out among the groups. none_is_missing: None, as a
    row or in a dict, is a reward that the sample does not have (NaN in the Scores); else it is a failure.
    """
    total = sum(sizes)
    rows = _rows(answer)
    if rows is None:
        message = f"returned {type(answer).__name__}, but a list of {total} numbers is needed"
        return [ScoreFailure(name, "raised", message) for _ in sizes]
    if len(rows) != total:
        message = f"returned {len(rows)} scores for {total} responses"
        return [ScoreFailure(name, "wrong_length", message) for _ in sizes]
    ends = np.cumsum(sizes)
    return [
        _read_group(name, rows[end - size : end], seconds / len(sizes), none_is_missing)
        for end, size in zip(ends, sizes, strict=True)
    ]


def _rows(answer: Any) -> list[Any] | None:
    """The entries of a list, array or tensor; None for what has no order or no length."""
    if isinstance(answer, str | bytes | bytearray | Mapping | set | frozenset):
        return None
    try:
        len(answer)
        return list(answer)
    except Exception:  # noqa: BLE001 — a tensor without dimensions, or an object of the user's own
        return None


def _read_group(name: str, rows: list[Any], seconds: float, none_is_missing: bool) -> Outcome:
    dicts = [row for row in rows if isinstance(row, Mapping)]
    try:
        if dicts and all(isinstance(row, Mapping) or (none_is_missing and row is None) for row in rows):
            return _read_dicts(name, rows, list(dicts[0]), seconds, none_is_missing)
        values, missing = _floats(rows, none_is_missing)
    except (TypeError, OverflowError) as error:
        return ScoreFailure(name, "raised", f"returned what is no score: {error}")
    return _in_range(name, values, missing) or Scores(
        name, np.where(missing, np.nan, values), seconds=seconds
    )


def _read_dicts(
    name: str, rows: list[Any], keys: list[Any], seconds: float, none_is_missing: bool
) -> Outcome:
    for number, row in enumerate(rows):
        if row is not None and (set(row) != set(keys) or not keys):
            there, first = sorted(map(str, row)), sorted(map(str, keys))
            message = f"returned components {there} for sample {number}, {first} for sample 0"
            return ScoreFailure(name, "raised", message if keys else "returned an empty dict")
    components: dict[str, np.ndarray] = {}
    for key in keys:
        column = [None if row is None else row[key] for row in rows]
        values, missing = _floats(column, none_is_missing)
        if failure := _in_range(name, values, missing):
            return failure
        components[str(key)] = np.where(missing, np.nan, values)
    whole = components["score"] if "score" in components else _sum_of_known(list(components.values()))
    missing = np.isnan(whole)
    return _in_range(name, whole, missing) or Scores(name, whole, components, seconds)


def _sum_of_known(columns: Sequence[np.ndarray]) -> np.ndarray:
    """NaN only where every column is."""
    return np.where(np.isnan(columns).all(axis=0), np.nan, np.nansum(columns, axis=0))


def _floats(rows: Sequence[Any], none_is_missing: bool) -> tuple[np.ndarray, np.ndarray]:
    """(float64 [n], bool [n] where None stood and counts as missing).

    TypeError for anything that is not a single number (text that looks like one included).
    """
    missing = np.array([none_is_missing and row is None for row in rows], dtype=bool)
    values = [
        0.0 if none else _number(row, i) for i, (row, none) in enumerate(zip(rows, missing, strict=True))
    ]
    return np.array(values, dtype=np.float64), missing


def _number(row: Any, sample: int) -> float:
    # Not np.asarray: it refuses tensors that require a gradient, and bfloat16.
    single = isinstance(row, SupportsFloat) and getattr(row, "ndim", 0) == 0
    if not single:
        raise TypeError(f"{value_text(row)} for sample {sample}, not a number")
    try:
        return float(row.detach() if hasattr(row, "detach") else row)
    except OverflowError:
        raise
    except Exception as error:
        raise TypeError(
            f"{value_text(row)} for sample {sample}, not a number: {error_text(error)}"
        ) from error


def _in_range(name: str, values: np.ndarray, missing: np.ndarray) -> ScoreFailure | None:
    """The failure of the first value that is NaN, infinite or beyond float32; missing ones aside."""
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero(~(np.abs(values) <= LARGEST_SCORE) & ~missing)
    if not len(wrong):
        return None
    value, message = values[wrong[0]], f"returned {values[wrong[0]]} for sample {wrong[0]}"
    if np.isfinite(value):
        message += f", beyond ±{LARGEST_SCORE:.3g}: advantages are float32"
    return ScoreFailure(name, "not_finite", message)
