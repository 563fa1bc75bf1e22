"""A reward of None through the whole loop on fakes: no sum, no mean, no signal; never 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_cluster.config.reward import ShapingConfig
from rl_cluster.errors import NoSignalError, ScorerError
from rl_cluster.protocols import SampleRow
from rl_cluster.rewards.answers import read_answer
from rl_cluster.rewards.local_scorer import LocalScorer
from rl_cluster.rewards.shaping import RunningMoments, shape_scores, weighted_sum
from rl_cluster.trajectory import Scores
from tests.loop.test_loop import Rig, make_config

NONE = float("nan")
WARNED = "All reward functions returned None"


def only_even(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float | None]:
    """Every second sample has no reward."""
    return [None if i % 2 else float(text.count("1")) for i, text in enumerate(responses)]


def nothing(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[None]:
    return [None] * len(responses)


def test_metrics_are_means_over_the_rewards_that_there_are(tmp_path: Path) -> None:
    rig = Rig(make_config(), tmp_path, scorer=LocalScorer("ones", only_even))
    with pytest.warns(UserWarning, match="All reward functions returned None for 4 of the 8 samples"):
        rig.run()
    row = rig.observer.rows[3]
    assert row["completions/without_reward_fraction"] == 0.5
    assert row["objective/scores"] == row["rewards/ones"] > 0
    assert row["objective/rlhf_reward"] == pytest.approx(row["objective/scores"])
    assert math.isfinite(rig.learner.weight)
    assert 0 <= rig.observer.rows[6]["eval/score_mean"] <= 3


def test_groups_without_any_reward_are_trained_with_advantage_0_or_dropped(tmp_path: Path) -> None:
    rig = Rig(make_config(run={"steps": 2}), tmp_path, scorer=LocalScorer("ones", nothing))
    rig.loop._evaluator = None
    before = rig.learner.weight
    with pytest.warns(UserWarning, match="All reward functions returned None for 8 of the 8 samples"):
        rig.run()
    assert rig.learner.weight == before
    assert rig.observer.rows[1]["objective/scores"] is None
    assert rig.observer.rows[1]["rewards/ones"] is None
    config = make_config(run={"steps": 2}, batch={"dynamic_sampling": True})
    dropping = Rig(config, tmp_path / "b", scorer=LocalScorer("ones", nothing))
    dropping.loop._evaluator = None
    with pytest.warns(UserWarning, match=WARNED), pytest.raises(NoSignalError, match="no signal"):
        dropping.run()


def test_an_evaluation_without_any_reward_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match=WARNED),
        pytest.raises(ScorerError, match="no scorer gave any sample"),
    ):
        Rig(make_config(), tmp_path, scorer=LocalScorer("ones", nothing)).run()


def test_the_sum_leaves_out_what_is_missing_and_is_missing_where_nothing_is_left() -> None:
    values = {"a": np.array([1.0, NONE, NONE]), "b": np.array([10.0, 20.0, NONE])}
    assert weighted_sum(values, {"a": 2.0, "b": 0.5}).tolist()[:2] == [7.0, 10.0]
    assert np.isnan(weighted_sum(values, {"a": 2.0, "b": 0.5})[2])
    watching = weighted_sum(values, {"a": 2.0, "b": 0.0})
    assert watching[0] == 2.0
    assert np.isnan(watching[1:]).all(), "a scorer of weight 0 only watches"


@pytest.mark.parametrize("normalize", ["none", "batch", "running"])
def test_shaping_is_over_the_rewards_that_there_are(normalize: Any) -> None:
    shaping = ShapingConfig(missing_eos_penalty=1.0, normalize=normalize, clip=5.0)
    known = {"s": np.array([1.0, 4.0, 7.0])}
    alone = shape_scores(known, {"s": 1.0}, [2] * 3, [True, False, True], 8, shaping)
    mixed_values = {"s": np.array([1.0, NONE, 4.0, 7.0])}
    mixed = shape_scores(mixed_values, {"s": 1.0}, [2] * 4, [True, True, False, True], 8, shaping)
    assert mixed.scores[[0, 2, 3]] == pytest.approx(alone.scores)
    assert np.isnan(mixed.scores[1])
    assert mixed.moments == alone.moments
    assert RunningMoments().update(np.array([NONE])) == RunningMoments()


def test_none_in_dicts_and_beside_dicts_is_a_missing_component() -> None:
    rows = [{"a": 1.0, "b": None}, None, {"a": None, "b": None}, {"a": 2.0, "b": 3.0}]
    (scores,) = read_answer("f", rows, (4,), 0.0, none_is_missing=True)
    assert isinstance(scores, Scores)
    assert scores.values[[0, 3]].tolist() == [1.0, 5.0]
    assert np.isnan(scores.values[1:3]).all()
    assert scores.components["a"][3] == 2.0
    assert np.isnan(scores.components["b"][:3]).all()


def test_a_table_says_none_for_a_sample_without_a_reward() -> None:
    assert SampleRow("q", "r", NONE).score_text == "none"
    assert SampleRow("q", "r", 0.5).score_text == "0.500"
