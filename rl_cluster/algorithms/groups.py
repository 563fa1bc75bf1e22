"""Scores of samples that share a prompt go in; group means, sizes and standard deviations come out."""

from __future__ import annotations

import numpy as np

from rl_cluster.errors import BadInputError


def group_mean(scores: np.ndarray, group_ids: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """Mean over each row's group, float64, shape of `scores` ([N] or [N, L], one row per sample).

    group_ids: int [N], any order, groups of any size. counted: bool [N], the rows that the mean is over
    (default all); 0 for a group without any.
    """
    _, group_of_row = np.unique(group_ids, return_inverse=True)
    chosen = slice(None) if counted is None else counted
    sums = np.zeros((group_of_row.max(initial=-1) + 1, *scores.shape[1:]))
    np.add.at(sums, group_of_row[chosen], scores[chosen].astype(np.float64))
    sizes = np.maximum(group_size(group_ids, counted), 1)
    values: np.ndarray = sums[group_of_row] / _column(sizes, scores)
    return values


def group_size(group_ids: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """int64 [N]: how many (of the counted) rows share the row's group."""
    _, group_of_row = np.unique(group_ids, return_inverse=True)
    sizes = np.zeros(group_of_row.max(initial=-1) + 1, dtype=np.int64)
    np.add.at(sizes, group_of_row, 1 if counted is None else counted.astype(np.int64))
    return sizes[group_of_row]


def group_std(scores: np.ndarray, group_ids: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """Unbiased standard deviation (n − 1) of each row's group, float64 [N]; groups of one are refused.

    counted: bool [N], the rows that it is over; 0 for a group with fewer than two of them.
    """
    refuse_single_samples(group_ids)
    squares = (scores - group_mean(scores, group_ids, counted)) ** 2
    sizes = group_size(group_ids, counted)
    values: np.ndarray = np.sqrt(group_mean(squares, group_ids, counted) * sizes / np.maximum(sizes - 1, 1))
    return values


def refuse_single_samples(group_ids: np.ndarray) -> None:
    """Raises BadInputError where a group has one sample: its baseline would be itself, or nothing."""
    sizes = group_size(group_ids)
    if len(sizes) and sizes.min() < 2:
        lonely = group_ids[int(np.argmin(sizes))]
        raise BadInputError(
            f"batch.samples_per_prompt: group {lonely} has 1 sample, but a baseline made of a prompt's "
            "samples needs at least 2; raise batch.samples_per_prompt or choose algorithm.name=reinforce"
        )


def _column(sizes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    return sizes.reshape(-1, *[1] * (scores.ndim - 1))
