"""Action counts of an optimizer step's rows go in; what each token of a row weighs in the loss comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def row_weights(
    aggregation: Aggregation,
    action_counts: np.ndarray,
    max_new_tokens: int,
    include: np.ndarray | None = None,
) -> np.ndarray:
    """float64 [rows]: the weight of every action of the row, for *all* rows of one optimizer step.

    The loss is the sum over tokens of weight times per-token loss. With T_i the row's actions and R the
    number of rows that train:
    token_mean: 1 / Σ T_i (DAPO). sequence_mean: 1 / (R T_i) (GRPO). constant: 1 / (R max_new_tokens)
    (Dr. GRPO).
    include: bool [rows], False for rows that must not train (mask_truncated): their weight is 0 and they
    count neither in R nor in Σ T_i. Rows without actions likewise. If no row is left, all weights are 0.
    """
    counts = np.asarray(action_counts, dtype=np.float64)
    trains = (counts > 0) if include is None else (counts > 0) & np.asarray(include, dtype=bool)
    num_rows = max(int(trains.sum()), 1)
    safe_counts = np.where(trains, counts, 1.0)
    choices: dict[str, Callable[[], np.ndarray]] = {
        "token_mean": lambda: np.full(len(counts), 1.0 / max(float(counts[trains].sum()), 1.0)),
        "sequence_mean": lambda: 1.0 / (num_rows * safe_counts),
        "constant": lambda: np.full(len(counts), 1.0 / (num_rows * max_new_tokens)),
    }
    weight = choices[aggregation]()
    return np.where(trains, weight, 0.0)
