"""Several scorers, each within range, whose weighted sum is not: a typed failure of them together."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rl_cluster.loop.producer import Scoring
from rl_cluster.rewards.failures import FailurePolicy
from rl_cluster.rewards.local_scorer import LocalScorer
from rl_cluster.trajectory import ScoreFailure


def scored(group, weights: dict[str, float], values: dict[str, float | None]):
    scorers = [
        LocalScorer(name, lambda p, r, m, value=values[name]: [value] * len(p), weight)
        for name, weight in weights.items()
    ]
    scoring = Scoring(scorers, FailurePolicy(max_retries=0, max_fraction=1.0))
    return asyncio.run(scoring.score(group)), scoring


@pytest.mark.parametrize(
    ("weights", "values"),
    [
        ({"a": 1.0, "b": 1.0}, {"a": 3e38, "b": 3e38}),
        ({"a": 1e10, "b": 1.0}, {"a": 1e30, "b": 0.0}),
        ({"a": 1e300, "b": -1e300}, {"a": 1e30, "b": 1e30}),
        ({"a": 1.0, "b": 1.0}, {"a": 3e38, "b": None}),
    ],
    ids=["sum", "weight", "inf_minus_inf", "beside_none"],
)
def test_a_weighted_sum_beyond_float32_is_a_failure_that_names_the_scorers(
    make_group, weights, values
) -> None:
    outcome, scoring = scored(make_group("1+1=", ["2", "3"]), weights, values)
    assert isinstance(outcome, ScoreFailure)
    assert (outcome.name, outcome.kind) == ("a + b", "not_finite")
    assert "advantages are float32" in outcome.message
    assert scoring.failures.counts == {"a + b/not_finite": 1}


def test_sums_within_range_and_missing_rewards_are_as_before(make_group) -> None:
    outcome, scoring = scored(make_group("1+1=", ["2", "3"]), {"a": 2.0, "b": -1.0}, {"a": 1e30, "b": 3.0})
    np.testing.assert_allclose(scoring.weighted_sum(outcome), 2e30)
    outcome, scoring = scored(make_group("1+1=", ["2", "3"]), {"a": 2.0, "b": 0.5}, {"a": None, "b": 3.0})
    np.testing.assert_allclose(scoring.weighted_sum(outcome), 1.5)
    outcome, scoring = scored(make_group("1+1=", ["2", "3"]), {"a": 1.0}, {"a": None})
    assert np.isnan(scoring.weighted_sum(outcome)).all()
