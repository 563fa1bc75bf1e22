"""Scores of samples that share a prompt go in; group means, sizes and standard deviations come out."""

from __future__ import annotations

import numpy as np

from rl_cluster.errors import BadInputError


def group_mean(scores: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Mean over each row's group, float64, shape of `scores` ([N] or [N, L], one row per sample).

    group_ids: int [N], any order, groups of any size.
    """
    _, group_of_row, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
    sums = np.zeros((len(sizes), *scores.shape[1:]))
    np.add.at(sums, group_of_row, scores.astype(np.float64))
    return (sums / _column(sizes, scores))[group_of_row]


def group_size(group_ids: np.ndarray) -> np.ndarray:
    """int64 [N]: how many rows share the row's group."""
    _, group_of_row, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
    return sizes[group_of_row]


def group_std(scores: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Unbiased standard deviation (n − 1) of each row's group, float64 [N]; groups of one are refused."""
    refuse_single_samples(group_ids)
    squares = (scores - group_mean(scores, group_ids)) ** 2
    sizes = group_size(group_ids)
    return np.sqrt(group_mean(squares, group_ids) * sizes / (sizes - 1))


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
