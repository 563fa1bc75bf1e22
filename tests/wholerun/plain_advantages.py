"""Scores, penalties and values of a step's rows go in, each token's advantage and return come out.

Every rule takes (algorithm, scores [N], groups [N], lengths [N], penalties [N][T], values [N][T] or None).
"""

from __future__ import annotations

from typing import Any

import numpy as np

Rows = list[np.ndarray]


def with_sequence_penalty(algorithm: Any, scores: np.ndarray, penalties: Rows) -> np.ndarray:
    if algorithm.kl.place != "reward_sequence":
        return scores
    return scores + np.array([p.sum() for p in penalties])


def token_rewards(algorithm: Any, scores: np.ndarray, penalties: Rows) -> Rows:
    """Each token's penalty, where it is in the reward; the score at the last token."""
    rows = [p.copy() if algorithm.kl.place == "reward_token" else np.zeros_like(p) for p in penalties]
    for row, score in zip(rows, with_sequence_penalty(algorithm, scores, penalties), strict=True):
        row[-1] += score
    return rows


def whitened(rows: Rows) -> Rows:
    every = np.concatenate(rows)
    return [(row - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8) for row in rows]


def grpo(algorithm: Any, scores: Any, groups: Any, lengths: Any, penalties: Rows, values: Any) -> Any:
    whole = with_sequence_penalty(algorithm, scores, penalties)
    result = []
    for score, group, length in zip(whole, groups, lengths, strict=True):
        mates = whole[groups == group]
        scale = {"group": mates.std(ddof=1) + 1e-4, "batch": whole.std(ddof=1) + 1e-4, "none": 1.0}
        result.append(np.full(length, (score - mates.mean()) / scale[algorithm.scale]))
    return result, None


def rloo(algorithm: Any, scores: Any, groups: Any, lengths: Any, penalties: Rows, values: Any) -> Any:
    whole = with_sequence_penalty(algorithm, scores, penalties)
    result = []
    for i, length in enumerate(lengths):
        others = [whole[j] for j in range(len(whole)) if groups[j] == groups[i] and j != i]
        result.append(np.full(length, whole[i] - np.mean(others)))
    if algorithm.normalize_advantage:
        first = np.array([row[0] for row in result])
        spread = np.sqrt(first.var(ddof=1) + 1e-8)
        result = [(row - first.mean()) / spread for row in result]
    return result, None


def ppo(algorithm: Any, scores: Any, groups: Any, lengths: Any, penalties: Rows, values: Any) -> Any:
    advantages, returns = [], []
    for rewards, seen in zip(token_rewards(algorithm, scores, penalties), values, strict=True):
        value = [*seen.tolist(), 0.0]
        deltas = [r + algorithm.gamma * value[t + 1] - value[t] for t, r in enumerate(rewards)]
        factor = algorithm.gamma * algorithm.lam
        row = [sum(factor**k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]
        advantages.append(np.array(row))
        returns.append(np.array(row) + np.array(value[:-1]))
    return (whitened(advantages) if algorithm.whiten_advantages else advantages), returns


def reinforce(algorithm: Any, scores: Any, groups: Any, lengths: Any, penalties: Rows, values: Any) -> Any:
    if algorithm.baseline == "group_mean":
        scores = scores - np.array([scores[groups == group].mean() for group in groups])
    rows = []
    for rewards in token_rewards(algorithm, scores, penalties):
        powers = [[algorithm.gamma**k for k in range(len(rewards) - t)] for t in range(len(rewards))]
        rows.append(np.array([np.dot(powers[t], rewards[t:]) for t in range(len(rewards))]))
    return (whitened(rows) if algorithm.whiten_advantages else rows), None


ADVANTAGES = {"grpo": grpo, "rloo": rloo, "ppo": ppo, "reinforce": reinforce}
