"""Metrics of parts become metrics of the whole: sums add up, extremes stay extremes."""

from __future__ import annotations

from rl_cluster.algorithms.totals import add_metrics


def test_sums_add_up_and_extremes_take_the_larger_whatever_the_order() -> None:
    parts = [
        {"loss_sum": 1.5, "gap_max": 0.25},
        {"loss_sum": -4.0, "gap_max": 0.75, "rows_sum": 2.0},
        {"loss_sum": 0.5, "gap_max": 0.5},
    ]
    for ordered in (parts, parts[::-1], [parts[1], parts[0], parts[2]]):
        totals: dict[str, float] = {}
        for part in ordered:
            add_metrics(totals, part)
        assert totals == {"loss_sum": -2.0, "gap_max": 0.75, "rows_sum": 2.0}


def test_an_extreme_below_zero_is_not_lost_to_a_zero_that_nobody_measured() -> None:
    totals: dict[str, float] = {}
    add_metrics(totals, {"advantage_max": -3.0})
    add_metrics(totals, {"advantage_max": -5.0})
    assert totals == {"advantage_max": -3.0}
