"""Metrics of parts (micro-batches, ranks) become metrics of the whole."""

from __future__ import annotations


def add_metrics(totals: dict[str, float], part: dict[str, float]) -> None:
    """Add `part` to `totals`: sums are added; what ends in `_max` takes the larger."""
    for name, value in part.items():
        if name.endswith("_max"):
            totals[name] = max(totals.get(name, value), value)
        else:
            totals[name] = totals.get(name, 0.0) + value
