from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_cluster.config.reward import ShapingConfig
from rl_cluster.rewards.shaping import RunningMoments, ShapedScores, overlong_penalty, shape_scores


def shape(
    values: list[float], shaping: ShapingConfig, moments: RunningMoments | None = None, **options: Any
) -> ShapedScores:
    defaults: dict[str, Any] = {
        "weights": {"f": 1.0},
        "action_counts": [5] * len(values),
        "ended_with_eos": [True] * len(values),
        "max_new_tokens": 10,
    }
    return shape_scores({"f": np.array(values)}, shaping=shaping, moments=moments, **{**defaults, **options})


def test_several_scorers_are_summed_with_their_weights() -> None:
    shaped = shape_scores(
        {"right": np.array([1.0, 0.0]), "brief": np.array([-3.0, 2.0])},
        {"right": 2.0, "brief": 0.5},
        [1, 1],
        [True, True],
        10,
        ShapingConfig(),
    )
    assert shaped.scores.tolist() == shaped.raw.tolist() == [0.5, 1.0]
    assert shaped.parts == {}


def test_a_missing_end_token_costs_its_penalty() -> None:
    shaped = shape([1.0, 1.0], ShapingConfig(missing_eos_penalty=0.25), ended_with_eos=[True, False])
    assert shaped.scores.tolist() == [1.0, 0.75]
    assert shaped.parts["missing_eos"].tolist() == [0.0, -0.25]


def test_overlong_answers_are_punished_as_in_the_dapo_paper() -> None:
    # L_max 20480, L_cache 4096: 0 up to 16384, −1 at 20480, linear between (Yu et al. 2025, eq. 13).
    lengths = np.array([100, 16384, 17408, 18432, 20480, 20481])
    expected = [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, 20480, 4096, 1.0).tolist() == expected
    shaped = shape(
        [1.0] * 6,
        ShapingConfig(overlong_buffer=4096, overlong_penalty=2.0),
        action_counts=lengths,
        max_new_tokens=20480,
    )
    assert shaped.scores.tolist() == [1.0, 1.0, 0.5, 0.0, -1.0, -1.0]


def test_every_drawn_token_costs_the_length_penalty() -> None:
    shaped = shape([1.0, 1.0], ShapingConfig(length_penalty=0.125), action_counts=[2, 8])
    assert shaped.scores.tolist() == [0.75, 0.0]


def test_batch_normalisation_is_torchs_standardisation() -> None:
    values = [1.0, 2.0, 4.0, -3.0]
    expected = torch.tensor(values, dtype=torch.float64)
    expected = (expected - expected.mean()) / (expected.std() + 1e-8)
    shaped = shape(values, ShapingConfig(normalize="batch"), RunningMoments(100, 50.0, 7.0))
    np.testing.assert_allclose(shaped.scores, expected.numpy(), rtol=1e-12)


def test_running_normalisation_counts_all_scores_so_far_this_batch_included() -> None:
    shaping = ShapingConfig(normalize="running")
    first = shape([1.0, 3.0], shaping)
    second = shape([5.0, 7.0], shaping, first.moments)
    everything = np.array([1.0, 3.0, 5.0, 7.0])
    expected = (np.array([5.0, 7.0]) - 4.0) / (everything.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(second.scores, expected, rtol=1e-12)
    assert second.moments.count == 4


def test_clipping_comes_last_and_penalties_before_normalisation() -> None:
    shaping = ShapingConfig(missing_eos_penalty=3.0, normalize="batch", clip=0.5)
    shaped = shape([0.0, 1.0, 5.0], shaping, ended_with_eos=[True, True, False])
    # After the penalty 0, 1, 2: mean 1, std 1; normalised −1, 0, 1; clipped to ±0.5.
    np.testing.assert_allclose(shaped.scores, [-0.5, 0.0, 0.5], atol=1e-7)
    assert list(shaped.parts) == ["missing_eos", "normalize", "clip"]


def test_equal_scores_normalise_to_zero() -> None:
    assert shape([2.0, 2.0], ShapingConfig(normalize="batch")).scores.tolist() == [0.0, 0.0]
    assert shape([2.0], ShapingConfig(normalize="running")).scores.tolist() == [0.0]


SCORES = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8)


@given(batches=st.lists(SCORES, min_size=1, max_size=5))
def test_running_moments_equal_those_of_all_values_at_once(batches: list[list[float]]) -> None:
    moments = RunningMoments()
    for batch in batches:
        moments = moments.update(np.array(batch))
    everything = np.concatenate(batches)
    assert moments.count == len(everything)
    assert moments.mean == pytest.approx(everything.mean(), abs=1e-9)
    if len(everything) > 1:
        assert moments.std == pytest.approx(everything.std(ddof=1), rel=1e-6, abs=1e-6)


def test_moments_survive_a_checkpoint() -> None:
    moments = RunningMoments().update(np.array([1.0, 4.0, 2.0]))
    assert RunningMoments.from_state(moments.state()) == moments
    assert moments.update(np.array([])) == moments


@given(
    values=SCORES, clip=st.none() | st.floats(0.1, 5), normalize=st.sampled_from(["none", "batch", "running"])
)
def test_raw_scores_and_parts_add_up_to_the_shaped_ones(
    values: list[float], clip: float | None, normalize: Any
) -> None:
    shaping = ShapingConfig(
        missing_eos_penalty=1.0, overlong_buffer=6, length_penalty=0.1, normalize=normalize, clip=clip
    )
    n = len(values)
    shaped = shape(
        values, shaping, action_counts=range(3, 3 + n), ended_with_eos=[i % 2 == 0 for i in range(n)]
    )
    total = shaped.raw + sum(shaped.parts.values())
    np.testing.assert_allclose(shaped.scores, total, atol=1e-9)
    assert clip is None or np.abs(shaped.scores).max() <= clip
