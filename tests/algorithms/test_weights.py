"""Weights of the rows of an optimizer step, by hand."""

import numpy as np
import pytest

from rl_cluster.algorithms.weights import row_weights

COUNTS = np.array([2, 4, 4])


def test_token_mean_gives_every_token_of_the_step_the_same_weight():
    np.testing.assert_allclose(row_weights("token_mean", COUNTS, 99), [0.1, 0.1, 0.1])


def test_sequence_mean_gives_every_row_the_same_total():
    np.testing.assert_allclose(row_weights("sequence_mean", COUNTS, 99), [1 / 6, 1 / 12, 1 / 12])


def test_constant_divides_by_the_longest_possible_response():
    np.testing.assert_allclose(row_weights("constant", COUNTS, 8), [1 / 24] * 3)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 6, 0, 1 / 6, 0]),
        ("sequence_mean", [1 / 4, 0, 1 / 8, 0]),
        ("constant", [1 / 16, 0, 1 / 16, 0]),
    ],
)
def test_rows_that_do_not_train_weigh_nothing_and_count_nowhere(aggregation, expected):
    include = np.array([True, False, True, True])
    counts = np.array([2, 100, 4, 0])
    np.testing.assert_allclose(row_weights(aggregation, counts, 8, include), expected)
    # A count of 0 says the same as include = False.
    np.testing.assert_allclose(row_weights(aggregation, np.array([2, 0, 4, 0]), 8), expected)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_nothing_left_to_train_gives_zeros_not_a_division_by_zero(aggregation):
    with np.errstate(all="raise"):
        assert row_weights(aggregation, np.array([0, 3]), 8, np.array([True, False])).tolist() == [0.0, 0.0]
        assert row_weights(aggregation, np.zeros(0), 8).tolist() == []


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_weights_of_a_mean_add_up_to_1_over_the_tokens(aggregation):
    counts = np.array([1, 5, 9, 2])
    assert (row_weights(aggregation, counts, 9) * counts).sum() == pytest.approx(1.0)
