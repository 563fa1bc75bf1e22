"""The scorers' values of a batch in; the scores that the advantages are made of, and what each part did, out.

N samples. The parts are applied in this order: weighted sum of the scorers, missing-end penalty, overlong
penalty, length penalty, normalisation, clipping (TRL's order, with DAPO's penalty before normalisation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_cluster.config.reward import ShapingConfig
from rl_cluster.rewards.answers import LARGEST_SCORE
from rl_cluster.trajectory import ScoreFailure

EPSILON = 1e-8
LARGEST_SUM = LARGEST_SCORE / 4
"""Of one sample: a difference of two of them, and penalties beside it, must still be numbers of float32."""


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and sum of squared deviations of all scores so far (Welford 1962, Chan's batch form)."""

    count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0

    def update(self, values: np.ndarray) -> RunningMoments:
        """With the values [n] added, those that are NaN (no reward) aside; n may be 0."""
        values = values[~np.isnan(values)]
        if len(values) == 0:
            return self
        count = self.count + len(values)
        batch_mean = float(np.mean(values))
        delta = batch_mean - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + delta * len(values) / count,
            squared_deviations=self.squared_deviations
            + float(np.sum((values - batch_mean) ** 2))
            + delta**2 * self.count * len(values) / count,
        )

    @property
    def std(self) -> float:
        """Sample standard deviation (n − 1, as torch's); 0 for fewer than two values."""
        return float(np.sqrt(self.squared_deviations / (self.count - 1))) if self.count > 1 else 0.0

    def state(self) -> dict[str, float]:
        """Plain values for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "squared_deviations": self.squared_deviations}

    @staticmethod
    def from_state(state: Mapping[str, float]) -> RunningMoments:
        return RunningMoments(int(state["count"]), float(state["mean"]), float(state["squared_deviations"]))


@dataclass(frozen=True)
class ShapedScores:
    """scores: float64 [N], for the advantages. raw: float64 [N], the weighted sum before shaping. Both are
    NaN where a sample has no reward at all.

    parts: what each part that is in use added, float64 [N] each; raw plus all parts is scores.
    moments: the running moments after this batch.
    """

    scores: np.ndarray
    raw: np.ndarray
    parts: Mapping[str, np.ndarray]
    moments: RunningMoments


def weighted_sum(values: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """float64 [N]: Σ weight × value over the scorers, each [N], those that are NaN (no reward) left out.

    NaN where no scorer with a weight has a reward: a scorer of weight 0 only watches.
    """
    names = [name for name in values if weights[name]] or list(values)
    rows = np.array([weights[name] * np.asarray(values[name], dtype=np.float64) for name in names])
    return np.where(np.isnan(rows).all(axis=0), np.nan, np.nansum(rows, axis=0))


def sum_out_of_range(values: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> ScoreFailure | None:
    """The failure of the first sample whose Σ |weight × value| is beyond LARGEST_SUM; NaN is no reward."""
    parts = [np.abs(weights[name] * np.asarray(column, dtype=np.float64)) for name, column in values.items()]
    sizes = np.nansum(parts, axis=0)
    wrong = np.flatnonzero(sizes > LARGEST_SUM)
    if not len(wrong):
        return None
    said = " + ".join(f"{weights[name]:g} × {name}" for name in values)
    message = (
        f"the weighted sum {said} is of size {sizes[wrong[0]]:.3g} for sample {wrong[0]}, beyond "
        f"{LARGEST_SUM:.3g}: advantages are float32. Lower the weights or the scores."
    )
    return ScoreFailure(" + ".join(values), "not_finite", message)


def missing_eos_penalty(ended_with_eos: np.ndarray, penalty: float) -> np.ndarray:
    """float64 [N]: −penalty where the sample did not end with an end token (TRL's missing_eos_penalty)."""
    return np.where(np.asarray(ended_with_eos, dtype=bool), 0.0, -penalty)


def overlong_penalty(
    action_counts: np.ndarray, max_new_tokens: int, buffer: int, penalty: float
) -> np.ndarray:
    """float64 [N]: 0 up to max_new_tokens − buffer drawn tokens, then linearly to −penalty at the maximum.

    Soft overlong punishment, Yu et al. 2025 (DAPO), eq. 13, times `penalty`. buffer: tokens, above 0.
    """
    excess = np.asarray(action_counts, dtype=np.float64) - (max_new_tokens - buffer)
    return -penalty * np.clip(excess / buffer, 0.0, 1.0)


def length_penalty(action_counts: np.ndarray, per_token: float) -> np.ndarray:
    """float64 [N]: −per_token for each drawn token."""
    return -per_token * np.asarray(action_counts, dtype=np.float64)


def normalize(scores: np.ndarray, moments: RunningMoments) -> np.ndarray:
    """float64 [N]: (scores − mean) / (std + 1e-8)."""
    return (scores - moments.mean) / (moments.std + EPSILON)


def shape_scores(
    values: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    action_counts: Sequence[int] | np.ndarray,
    ended_with_eos: Sequence[bool] | np.ndarray,
    max_new_tokens: int,
    shaping: ShapingConfig,
    moments: RunningMoments | None = None,
) -> ShapedScores:
    """Apply every part of `shaping` to the weighted sum of the scorers' values.

    values: name -> float64 [N]; weights: name -> weight. action_counts: drawn tokens [N].
    moments: of the scores before this batch (normalize="running" counts this batch in, then uses them).
    """
    moments = moments or RunningMoments()
    counts, ended = np.asarray(action_counts), np.asarray(ended_with_eos, dtype=bool)
    raw = weighted_sum(values, weights)
    parts: dict[str, np.ndarray] = {}
    if shaping.missing_eos_penalty is not None:
        parts["missing_eos"] = missing_eos_penalty(ended, shaping.missing_eos_penalty)
    if shaping.overlong_buffer > 0:
        parts["overlong"] = overlong_penalty(
            counts, max_new_tokens, shaping.overlong_buffer, shaping.overlong_penalty
        )
    if shaping.length_penalty > 0:
        parts["length"] = length_penalty(counts, shaping.length_penalty)
    scores = raw + np.sum(list(parts.values()), axis=0) if parts else raw
    if shaping.normalize != "none":
        batch = RunningMoments().update(scores)
        moments = moments.update(scores)
        normalized = normalize(scores, batch if shaping.normalize == "batch" else moments)
        parts["normalize"], scores = normalized - scores, normalized
    if shaping.clip is not None:
        clipped = np.clip(scores, -shaping.clip, shaping.clip)
        parts["clip"], scores = clipped - scores, clipped
    return ShapedScores(scores=scores, raw=raw, parts=parts, moments=moments)
