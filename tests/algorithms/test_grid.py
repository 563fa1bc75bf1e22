"""The way from ragged tokens to the action grid and back."""

import numpy as np

from rl_cluster.algorithms.grid import ActionGrid

MASK = np.array([False, True, True, False, False, True, False, True, True, False])
LENGTHS = np.array([3, 6, 1])  # rows of 2, 3 (with a gap) and 0 actions


def test_the_grid_holds_the_actions_of_each_row_side_by_side():
    grid = ActionGrid.of(MASK, LENGTHS)
    assert grid.shape == (3, 3)
    assert grid.counts.tolist() == [2, 3, 0]
    assert grid.pad(np.arange(10.0)).tolist() == [[1, 2, 0], [5, 7, 8], [0, 0, 0]]
    assert grid.mask.tolist() == [[True, True, False], [True, True, True], [False, False, False]]


def test_a_score_lands_on_the_last_action_and_nowhere_in_a_row_without_one():
    scores = np.array([10.0, 20.0, 30.0])
    assert ActionGrid.of(MASK, LENGTHS).on_last(scores).tolist() == [[0, 10, 0], [0, 0, 20], [0, 0, 0]]


def test_flatten_puts_everything_back_in_its_place_as_float32():
    grid = ActionGrid.of(MASK, LENGTHS)
    tokens = grid.flatten(grid.pad(np.arange(10.0)))
    assert tokens.dtype == np.float32
    assert tokens.tolist() == [0, 1, 2, 0, 0, 5, 0, 7, 8, 0]


def test_flatten_gives_one_number_per_row_to_each_of_its_actions():
    tokens = ActionGrid.of(MASK, LENGTHS).flatten(np.array([[1.5], [-2.0], [9.0]]))
    assert tokens.tolist() == [0, 1.5, 1.5, 0, 0, -2, 0, -2, -2, 0]
