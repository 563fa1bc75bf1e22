"""Rewards and values go in, advantages come out: numpy float64, [N] per row or right-padded grids [N, L].

ActionGrid (grid.py) makes the grids and turns them back into the float32 [T] columns of a TokenBatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from rl_cluster.algorithms.groups import group_mean, group_size, group_std, refuse_single_samples

GROUP_EPSILON = 1e-4
"""Added to the standard deviation of group-normalised scores; TRL's GRPO has the same."""
WHITEN_EPSILON = 1e-8
"""Added to the variance when whitening; TRL's masked_whiten has the same."""


def gae(
    rewards_NL: np.ndarray,
    values_NL: np.ndarray,
    gamma: float,
    lam: float,
    dones_NL: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation and the value targets (advantages + values), both [N, L].

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γ λ A_{t+1} (Schulman et al. 2016, equations 11 to 16), with
    V = 0 after a row's last action and, if given, after every True of dones_NL. Rewards and values must be
    0 in the padding, where the results are 0 too.
    """
    num_rows, num_columns = rewards_NL.shape
    going_on = np.ones(rewards_NL.shape) if dones_NL is None else 1.0 - dones_NL.astype(np.float64)
    advantages = np.zeros(rewards_NL.shape)
    next_value, next_advantage = np.zeros(num_rows), np.zeros(num_rows)
    for t in reversed(range(num_columns)):
        delta = rewards_NL[:, t] + gamma * going_on[:, t] * next_value - values_NL[:, t]
        next_advantage = delta + gamma * lam * going_on[:, t] * next_advantage
        advantages[:, t] = next_advantage
        next_value = values_NL[:, t]
    return advantages, advantages + values_NL


def discounted_returns(rewards_NL: np.ndarray, gamma: float) -> np.ndarray:
    """G_t = r_t + γ G_{t+1}, [N, L]: the advantage of REINFORCE++ (Hu 2025) before normalisation."""
    returns = np.zeros(rewards_NL.shape)
    ahead = np.zeros(rewards_NL.shape[0])
    for t in reversed(range(rewards_NL.shape[1])):
        ahead = rewards_NL[:, t] + gamma * ahead
        returns[:, t] = ahead
    return returns


def leave_one_out(scores: np.ndarray, group_ids: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """Each score minus the mean of the *other* scores of its group (RLOO, Ahmadian et al. 2024).

    scores: [N], or [N, L] to do it column by column. group_ids: int [N], any order, unequal sizes allowed.
    A group of one is refused. R − mean(others) = (R − mean(all)) · k / (k − 1). counted: bool [N], rows that
    have a score; the others get 0 and are in no mean, and so does a row that is alone with its score.
    """
    sizes = group_size(group_ids, counted).reshape(-1, *[1] * (scores.ndim - 1))
    values: np.ndarray = group_centred(scores, group_ids, counted) * sizes / np.maximum(sizes - 1, 1)
    return values


def group_centred(scores: np.ndarray, group_ids: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """Each score minus the mean of its whole group; [N] or [N, L]. Groups of one are refused.

    counted: bool [N], as for leave_one_out.
    """
    refuse_single_samples(group_ids)
    centred = scores - group_mean(scores, group_ids, counted)
    return centred if counted is None else only_counted(centred, counted)


def only_counted(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """values [N] or [N, L], 0 in the rows that are not counted (bool [N])."""
    return np.where(counted.reshape(-1, *[1] * (values.ndim - 1)), values, 0.0)


def group_normalised(
    scores: np.ndarray,
    group_ids: np.ndarray,
    scale: Literal["group", "batch", "none"] = "group",
    epsilon: float = GROUP_EPSILON,
    counted: np.ndarray | None = None,
) -> np.ndarray:
    """(score − mean of its group) / (std + epsilon), GRPO (Shao et al. 2024), [N] or [N, L].

    std is unbiased (n − 1) as in TRL: of the row's group, of the scores of the whole batch, or no division
    at all (Dr. GRPO, Liu et al. 2025). Of [N, L], the std is that of the first column, the whole return.
    counted: bool [N], rows that have a score: means and deviations are over these, the others get 0.
    """
    centred = group_centred(scores, group_ids, counted)
    whole = scores if scores.ndim == 1 else scores[:, 0]
    choices: dict[str, Callable[[], np.ndarray]] = {
        "group": lambda: group_std(whole, group_ids, counted) + epsilon,
        "batch": lambda: np.full(len(whole), batch_std(whole, counted) + epsilon),
        "none": lambda: np.ones(len(whole)),
    }
    std = choices[scale]()
    values: np.ndarray = centred / std.reshape(-1, *[1] * (scores.ndim - 1))
    return values


def batch_std(scores: np.ndarray, counted: np.ndarray | None = None) -> float:
    """Unbiased standard deviation of the (counted) scores [N]; 0 for fewer than two counted ones."""
    chosen = scores if counted is None else scores[counted]
    return 0.0 if counted is not None and len(chosen) < 2 else float(chosen.std(ddof=1))


def whiten(values: np.ndarray, mask: np.ndarray, shift_mean: bool = True) -> np.ndarray:
    """(v − mean) / sqrt(var + 1e-8) over the True entries of mask, 0 at the others; var is unbiased.

    shift_mean False adds the mean back, so that only the scale changes (TRL's masked_whiten). Of a single
    entry the variance counts as 1: there is nothing to scale by.
    """
    chosen = values[mask]
    if chosen.size == 0:
        return np.zeros(values.shape)
    mean = chosen.mean()
    variance = chosen.var(ddof=1) if chosen.size > 1 else 1.0
    whitened = (values - mean) / np.sqrt(variance + WHITEN_EPSILON)
    return np.where(mask, whitened if shift_mean else whitened + mean, 0.0)
