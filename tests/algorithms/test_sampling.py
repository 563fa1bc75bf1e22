"""Signal in a group, and pass@k."""

from itertools import combinations

import numpy as np
import pytest

from rl_cluster.algorithms.sampling import has_signal, pass_at_k
from rl_cluster.errors import BadInputError


def test_a_group_has_a_signal_only_if_some_score_differs():
    assert has_signal(np.array([0.0, 0.0, 1.0]))
    assert has_signal(np.array([-1e-3, 0.0]))
    assert not has_signal(np.array([1.0, 1.0, 1.0]))
    assert not has_signal(np.array([0.7]))


def test_rounding_in_a_weighted_sum_is_not_a_signal():
    assert not has_signal(np.array([0.1 + 0.2, 0.3]))
    assert not has_signal(np.array([1e6 * (0.1 + 0.2), 1e6 * 0.3]))


@pytest.mark.parametrize(("num_samples", "num_correct"), [(5, 0), (5, 1), (6, 2), (6, 5), (4, 4)])
def test_pass_at_k_equals_the_share_of_subsets_with_a_correct_sample(num_samples, num_correct):
    correct = [True] * num_correct + [False] * (num_samples - num_correct)
    for k in range(1, num_samples + 1):
        subsets = list(combinations(correct, k))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


def test_pass_at_more_than_there_are_samples_is_refused():
    with pytest.raises(BadInputError, match="k=8 needs at least k samples per prompt, there are 4"):
        pass_at_k(4, 2, 8)
