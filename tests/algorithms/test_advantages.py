"""Advantages against numbers worked out by hand and against plain loops."""

import numpy as np
import pytest

from rl_cluster.algorithms.advantages import (
    discounted_returns,
    gae,
    group_centred,
    group_normalised,
    leave_one_out,
    whiten,
)
from rl_cluster.errors import BadInputError


def loop_gae(rewards, values, dones, gamma, lam):
    """The definition A_t = Σ_l (γλ)^l δ_{t+l}, summed forwards; one row, no padding."""
    count = len(rewards)
    deltas = []
    for t in range(count):
        following = values[t + 1] if t + 1 < count and not dones[t] else 0.0
        deltas.append(rewards[t] + gamma * following - values[t])
    advantages = []
    for t in range(count):
        total, discount = 0.0, 1.0
        for later in range(t, count):
            total += discount * deltas[later]
            if dones[later]:
                break
            discount *= gamma * lam
        advantages.append(total)
    return np.array(advantages)


def test_gae_of_three_tokens_is_what_a_pencil_gives():
    # γ = 0.5, λ = 0.5; δ = (0 + 1 − 1, 0 + 2 − 2, 3 + 0 − 4) = (0, 0, −1); A = (−1/16, −1/4, −1)
    advantages, returns = gae(np.array([[0.0, 0.0, 3.0]]), np.array([[1.0, 2.0, 4.0]]), 0.5, 0.5)
    np.testing.assert_allclose(advantages, [[-0.0625, -0.25, -1.0]])
    np.testing.assert_allclose(returns, [[0.9375, 1.75, 3.0]])


def test_gae_of_ragged_rows_equals_the_forward_sum_of_each_row():
    random = np.random.default_rng(0)
    counts, width = [1, 7, 4, 12], 12
    rewards, values = np.zeros((4, width)), np.zeros((4, width))
    for i, count in enumerate(counts):
        rewards[i, :count], values[i, :count] = random.normal(size=(2, count))
    advantages, returns = gae(rewards, values, 0.97, 0.9)
    for i, count in enumerate(counts):
        expected = loop_gae(rewards[i, :count], values[i, :count], np.zeros(count, bool), 0.97, 0.9)
        np.testing.assert_allclose(advantages[i, :count], expected, rtol=1e-12)
        np.testing.assert_allclose(returns[i, :count], expected + values[i, :count], rtol=1e-12)
        assert (advantages[i, count:] == 0).all()
        assert (returns[i, count:] == 0).all()


def test_gae_does_not_look_past_an_episode_that_ends_inside_a_row():
    random = np.random.default_rng(1)
    rewards, values = random.normal(size=(2, 1, 9))
    dones = np.zeros((1, 9), bool)
    dones[0, [3, 8]] = True
    advantages, _ = gae(rewards, values, 0.9, 0.8, dones)
    np.testing.assert_allclose(advantages[0], loop_gae(rewards[0], values[0], dones[0], 0.9, 0.8), rtol=1e-12)


def test_gae_with_lambda_1_is_the_return_minus_the_value_and_with_0_the_one_step_error():
    rewards, values = np.array([[1.0, 2.0, 3.0]]), np.array([[0.5, 0.25, 4.0]])
    advantages, returns = gae(rewards, values, 1.0, 1.0)
    np.testing.assert_allclose(returns, [[6.0, 5.0, 3.0]])
    np.testing.assert_allclose(advantages, [[5.5, 4.75, -1.0]])
    np.testing.assert_allclose(gae(rewards, values, 1.0, 0.0)[0], [[0.75, 5.75, -1.0]])


def test_discounted_returns_by_hand():
    rewards = np.array([[1.0, 0.0, 8.0], [2.0, 4.0, 0.0]])
    np.testing.assert_allclose(discounted_returns(rewards, 0.5), [[3.0, 4.0, 8.0], [4.0, 4.0, 0.0]])


def test_leave_one_out_gives_the_worked_example_of_trls_rloo_page():
    # 3 prompts × 4 completions; completion c of prompt p stands at 3c + p, as on the page.
    scores = np.array([1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10], dtype=np.float64)
    prompts = np.array([0, 1, 2] * 4)
    advantages = leave_one_out(scores, prompts)
    assert advantages[0] == pytest.approx(1 - (2 + 5 + 8) / 3)
    assert advantages[7] == pytest.approx(6 - (3 + 2 + 9) / 3)
    expected = []
    for i in range(12):
        others = [scores[j] for j in range(12) if prompts[j] == prompts[i] and j != i]
        expected.append(scores[i] - sum(others) / 3)
    np.testing.assert_allclose(advantages, expected, rtol=1e-12)
    np.testing.assert_allclose(advantages, np.repeat([-4, -8 / 3, 4 / 3, 16 / 3], 3), rtol=1e-12)


def test_leave_one_out_takes_groups_of_any_size_in_any_order():
    scores, groups = np.array([1.0, 10.0, 3.0, 20.0, 8.0]), np.array([7, -2, 7, -2, 7])
    np.testing.assert_allclose(leave_one_out(scores, groups), [-4.5, -10.0, -1.5, 10.0, 6.0])


def test_leave_one_out_of_a_grid_works_column_by_column():
    grid, groups = np.array([[1.0, 5.0], [3.0, 1.0], [8.0, 0.0]]), np.zeros(3, int)
    columns = [leave_one_out(grid[:, c], groups) for c in range(2)]
    np.testing.assert_allclose(leave_one_out(grid, groups), np.stack(columns, axis=1))


@pytest.mark.parametrize("baseline", [leave_one_out, group_centred, group_normalised])
def test_a_group_of_one_is_refused_by_name_with_a_remedy(baseline):
    with pytest.raises(BadInputError, match=r"group 9 has 1 sample.*batch\.samples_per_prompt"):
        baseline(np.array([1.0, 2.0, 3.0]), np.array([4, 9, 4]))


def test_group_normalised_divides_by_the_unbiased_deviation_of_the_group():
    scores, groups = np.array([0.0, 5.0, 2.0, 9.0]), np.array([0, 1, 0, 1])
    # group 0: mean 1, std √2; group 1: mean 7, std √8
    expected = [-1 / (2**0.5 + 1e-4), -2 / (8**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 2 / (8**0.5 + 1e-4)]
    np.testing.assert_allclose(group_normalised(scores, groups), expected, rtol=1e-12)


def test_group_normalised_by_the_batch_uses_the_deviation_of_all_scores():
    scores, groups = np.array([0.0, 5.0, 2.0, 9.0]), np.array([0, 1, 0, 1])
    std = (((scores - 4.0) ** 2).sum() / 3) ** 0.5
    expected = np.array([-1, -2, 1, 2]) / (std + 1e-4)
    np.testing.assert_allclose(group_normalised(scores, groups, "batch"), expected, rtol=1e-12)


def test_group_normalised_with_scale_none_only_subtracts_the_mean():
    scores, groups = np.array([0.0, 5.0, 2.0, 9.0]), np.array([0, 1, 0, 1])
    np.testing.assert_allclose(group_normalised(scores, groups, "none"), [-1, -2, 1, 2])


def test_group_normalised_of_equal_scores_is_0_and_finite():
    np.testing.assert_allclose(group_normalised(np.full(3, 0.1), np.zeros(3, int)), 0.0, atol=1e-9)


def test_group_centred_by_hand():
    np.testing.assert_allclose(
        group_centred(np.array([1.0, 4.0, 5.0]), np.array([3, 3, 3])), [-7 / 3, 2 / 3, 5 / 3]
    )


def test_whiten_by_hand_leaves_out_what_the_mask_leaves_out():
    values, mask = np.array([[1.0, 3.0, 99.0], [5.0, 7.0, -99.0]]), np.array([[True, True, False]] * 2)
    # mean 4, unbiased variance 20/3
    scale = 1 / np.sqrt(20 / 3 + 1e-8)
    centred = np.array([[-3.0, -1.0, 0.0], [1.0, 3.0, 0.0]]) * scale
    np.testing.assert_allclose(whiten(values, mask), centred, rtol=1e-12)
    np.testing.assert_allclose(
        whiten(values, mask, shift_mean=False), centred + np.where(mask, 4.0, 0.0), rtol=1e-12
    )


def test_whiten_of_one_or_no_entry_is_finite():
    assert whiten(np.array([[5.0, 1.0]]), np.array([[True, False]])).tolist() == [[0.0, 0.0]]
    assert whiten(np.array([[5.0]]), np.array([[True]]), shift_mean=False).tolist() == [[5.0]]
    assert whiten(np.array([[5.0]]), np.array([[False]])).tolist() == [[0.0]]
