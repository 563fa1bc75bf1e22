"""Scores of one prompt's samples go in; whether they teach anything, and pass@k, come out. No torch."""

from __future__ import annotations

import numpy as np

from rl_cluster.errors import BadInputError


def has_signal(scores: np.ndarray, tolerance: float = 1e-9) -> bool:
    """False where the scores [n] of a group are all equal: no advantage (DAPO drops such groups).

    A NaN is a sample without a reward; a group with fewer than two rewards has no signal either.

    tolerance: relative to the largest magnitude, at least absolute; it forgives rounding in weighted sums.
    """
    scores = scores[~np.isnan(scores)]
    if len(scores) < 2:
        return False
    scale = max(1.0, float(np.abs(scores).max()))
    return bool(np.ptp(scores) > tolerance * scale)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased probability that at least one of k samples is correct: 1 − C(n − c, k) / C(n, k).

    Chen et al. 2021 (Codex), equation 1, as a product so that nothing overflows. BadInputError if k > n.
    """
    if not 1 <= k <= num_samples:
        raise BadInputError(
            f"eval.pass_at: k={k} needs at least k samples per prompt, there are {num_samples}; "
            f"set eval.samples_per_prompt to {k} or more"
        )
    assert 0 <= num_correct <= num_samples
    num_wrong = num_samples - num_correct
    if num_wrong < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_wrong + 1, num_samples + 1)))
