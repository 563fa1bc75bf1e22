from __future__ import annotations

import numpy as np
import pytest

from rl_cluster.config.reward import ExactMatchScorer, RewardConfig
from rl_cluster.errors import ScorerError
from rl_cluster.rewards.failures import FailurePolicy, FailureWindow, first_failure
from rl_cluster.trajectory import ScoreFailure, Scores

FAILURE = ScoreFailure("judge", "raised", "KeyError: 'x'", "Traceback …\nKeyError: 'x'")


def policy(**options: object) -> FailurePolicy:
    return FailurePolicy.from_config(RewardConfig(scorers=(ExactMatchScorer(),), **options))  # type: ignore[arg-type]


def test_a_group_is_retried_so_many_times_then_dropped() -> None:
    assert [policy(max_retries=2).action(attempt) for attempt in (1, 2, 3)] == ["retry", "retry", "drop"]
    assert policy(max_retries=0).action(1) == "drop"


def test_dropping_at_once_ignores_the_number_of_retries() -> None:
    assert policy(on_failure="drop", max_retries=5).action(1) == "drop"


def test_a_scorer_that_always_fails_stops_the_run_at_the_eleventh_group() -> None:
    window = FailureWindow(policy(max_failure_fraction=0.2))
    for _ in range(10):
        window.record(FAILURE)
    with pytest.raises(ScorerError) as caught:
        window.record(FAILURE)
    scorer, cause = caught.value.args
    assert scorer == "judge"
    assert "failed for 11 of the last 11 groups (rewards.max_failure_fraction=0.2)" in cause
    assert cause.endswith("Traceback …\nKeyError: 'x'")


def test_failures_at_exactly_the_limit_never_stop_the_run() -> None:
    window = FailureWindow(policy(max_failure_fraction=0.2))
    for _ in range(100):
        window.record(FAILURE)
        for _ in range(4):
            window.record(None)
    assert window.failure_fraction == pytest.approx(0.2)
    assert window.counts == {"judge/raised": 100}


def test_a_burst_is_forgotten_after_fifty_groups() -> None:
    window = FailureWindow(policy(max_failure_fraction=0.2))
    for _ in range(10):
        window.record(FAILURE)
    for _ in range(41):
        window.record(None)
    window.record(FAILURE)
    assert window.failure_fraction == pytest.approx(9 / 50)


def test_a_limit_of_0_stops_at_the_first_failure_and_of_1_never() -> None:
    with pytest.raises(ScorerError):
        FailureWindow(policy(max_failure_fraction=0.0)).record(FAILURE)
    tolerant = FailureWindow(policy(max_failure_fraction=1.0))
    for _ in range(200):
        tolerant.record(FAILURE)
    assert tolerant.failure_fraction == 1.0


def test_an_empty_window_has_no_failures() -> None:
    assert FailureWindow(policy()).failure_fraction == 0.0


def test_the_first_failure_decides_about_a_group() -> None:
    scores = Scores("a", np.ones(2))
    assert first_failure([scores, FAILURE, ScoreFailure("b", "timeout", "…")]) is FAILURE
    assert first_failure([scores, scores]) is None
