"""Sums over an optimizer step or an evaluation in, metrics with their names out."""

from __future__ import annotations

from collections.abc import Mapping

Metrics = dict[str, float | None]

MEANS = {
    "accuracy": ("accuracy_sum", "examples_sum"),
    "chosen_rewards": ("chosen_rewards_sum", "chosen_sum"),
    "rejected_rewards": ("rejected_rewards_sum", "rejected_sum"),
    "chosen_logps": ("chosen_logps_sum", "chosen_sum"),
    "rejected_logps": ("rejected_logps_sum", "rejected_sum"),
    "nll": ("nll_sum", "examples_sum"),
    "odds_ratio_loss": ("odds_ratio_loss_sum", "examples_sum"),
}
"""name -> (numerator, denominator)."""


def loss_of(totals: Mapping[str, float]) -> float:
    """Mean over the examples; of supervised training, which has none, over the tokens (nats)."""
    if "examples_sum" in totals:
        return totals["example_loss_sum"] / totals["examples_sum"]
    return totals["nll_sum"] / totals["tokens_sum"]


def fit_metrics(totals: Mapping[str, float], area: str) -> Metrics:
    """area: train or eval. What the objective does not have is left out; 0/0 (no desirable row) is None."""
    metrics: Metrics = {f"{area}/loss": loss_of(totals)}
    if "examples_sum" not in totals:
        return metrics
    for name, (numerator, denominator) in MEANS.items():
        if numerator in totals:
            count = totals[denominator]
            metrics[f"{area}/{name}"] = totals[numerator] / count if count else None
    chosen, rejected = metrics[f"{area}/chosen_rewards"], metrics[f"{area}/rejected_rewards"]
    metrics[f"{area}/margin"] = None if chosen is None or rejected is None else chosen - rejected
    return metrics
