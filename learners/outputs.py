"""What the ranks compute per token, each for its rows, and how it becomes columns in the batch's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_cluster.protocols import ForwardOutput


@dataclass(frozen=True)
class LogprobsPart:
    """One rank's share of a column: where its A tokens are in the batch, int64 [A], and float32 [A], or
    [A, K] of K targets per token."""

    places: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class ForwardPart(LogprobsPart):
    """One rank's share of a ForwardOutput: float32 [A] each."""

    entropy: np.ndarray
    values: np.ndarray | None
    kl: np.ndarray | None


def joined(columns: list[np.ndarray], dtype: Any = np.float32) -> np.ndarray:
    """End to end; there may be none."""
    some = [column for column in columns if len(column) > 0] or [np.zeros(0, dtype)]
    values: np.ndarray = np.concatenate(some).astype(dtype)
    return values


def spread(num_tokens: int, parts: Sequence[LogprobsPart], columns: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [num_tokens], or [num_tokens, K]: the parts' columns at their places, 0 elsewhere."""
    wide = {column.shape[1:] for column in columns if len(column) > 0}
    result = np.zeros((num_tokens, *(wide.pop() if wide else ())), dtype=np.float32)
    for part, column in zip(parts, columns, strict=True):
        if len(column) > 0:
            result[part.places] = column
    return result


def whole_output(num_tokens: int, parts: Sequence[ForwardPart]) -> ForwardOutput:
    """In the order of the batch, 0 where not an action."""
    values = [part.values for part in parts if part.values is not None]
    kl = [part.kl for part in parts if part.kl is not None]
    return ForwardOutput(
        logprobs=spread(num_tokens, parts, [part.logprobs for part in parts]),
        entropy=spread(num_tokens, parts, [part.entropy for part in parts]),
        values=spread(num_tokens, parts, values) if values else None,
        kl=spread(num_tokens, parts, kl) if kl else None,
    )
