"""The sums that a loss counted become the means that a user reads."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = {
    "policy_loss_sum": "policy_loss",
    "value_loss_sum": "value_loss",
    "value_clipfrac_sum": "value_clip_fraction",
    "entropy_sum": "entropy",
    "approxkl_sum": "approx_kl",
    "clipfrac_sum": "clip_fraction",
    "ratio_sum": "mean_ratio",
}
"""Sum over tokens (algorithms/objectives.py) -> its mean over the trained tokens."""

SHOWN = {
    "cross_entropy": frozenset[str](),
    "importance_sampling": frozenset({"policy_loss_sum", "approxkl_sum", "ratio_sum"}),
    "ppo": frozenset(NAMES),
}


def loss_metrics(loss_name: str, sums: Mapping[str, float]) -> dict[str, float]:
    """Means over the trained tokens of the call; those that mean something for this loss."""
    tokens = max(sums["tokens_sum"], 1.0)
    return {NAMES[key]: sums[key] / tokens for key in NAMES if key in sums and key in SHOWN[loss_name]}
