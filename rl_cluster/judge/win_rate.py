"""Outcomes of compared pairs in, win rates with bootstrap confidence intervals out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError, ScorerError
from rl_cluster.judge.verdicts import Judge, PairVerdict, judge_pairs

MOST_DRAWN = 1_000_000
"""Values held at once while resampling: 8 MB."""


@dataclass(frozen=True)
class Interval:
    """A mean and its percentile bootstrap interval at the confidence that was asked for."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class WinRate:
    """The candidate's wins against the reference; a tie is half a win.

    wins, ties, losses: pairs whose outcome is above, at, below 0.5. failures: pairs without an answer, which
    count nowhere else. first_place_rate: how often the judge preferred the first place (0.5: no liking for a
    place); agreement: share of the pairs on which both orders name the same winner, or a tie. Both None
    without a position swap.
    """

    rate: Interval
    wins: int
    ties: int
    losses: int
    failures: int
    first_place_rate: float | None
    agreement: float | None

    @property
    def num_pairs(self) -> int:
        return self.wins + self.ties + self.losses

    def __str__(self) -> str:
        return (
            f"win rate {100 * self.rate.mean:.1f} % [{100 * self.rate.low:.1f}, {100 * self.rate.high:.1f}], "
            f"{self.wins} wins, {self.ties} ties, {self.losses} losses, {self.failures} without a verdict"
        )


def judged_win_rate(
    judge: Judge,
    prompts: Sequence[str],
    candidate: Sequence[str],
    reference: Sequence[str],
    *,
    swap: bool = True,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
    max_failure_rate: float = 0.1,
) -> WinRate:
    """Ask the judge about every pair and count. ScorerError if more than max_failure_rate go unanswered."""
    verdicts = judge_pairs(judge, prompts, candidate, reference, swap=swap)
    failures = sum(verdict.outcome is None for verdict in verdicts)
    if failures > max_failure_rate * len(verdicts) or failures == len(verdicts):
        raise ScorerError(
            "judge",
            f"no verdict on {failures} of {len(verdicts)} pairs; max_failure_rate is {max_failure_rate:g}",
        )
    return count_verdicts(verdicts, confidence=confidence, num_resamples=num_resamples, seed=seed)


def count_verdicts(
    verdicts: Sequence[PairVerdict],
    *,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> WinRate:
    """Pairs without an outcome count as failures and nothing else."""
    outcomes = np.array([verdict.outcome for verdict in verdicts if verdict.outcome is not None])
    both = [(v.candidate_first, v.candidate_second) for v in verdicts if v.swapped and v.outcome is not None]
    places = np.array(
        [[first, 1.0 - second] for first, second in both if first is not None and second is not None]
    )
    return WinRate(
        rate=bootstrap_mean(outcomes, confidence=confidence, num_resamples=num_resamples, seed=seed),
        wins=int((outcomes > 0.5).sum()),
        ties=int((outcomes == 0.5).sum()),
        losses=int((outcomes < 0.5).sum()),
        failures=len(verdicts) - len(outcomes),
        first_place_rate=float(places.mean()) if len(places) else None,
        agreement=float((np.sign(places[:, 0] - 0.5) == np.sign(0.5 - places[:, 1])).mean())
        if len(places)
        else None,
    )


def paired_rise(
    before: Sequence[PairVerdict],
    after: Sequence[PairVerdict],
    *,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The rise of the win rate between two candidates on the same prompts, in the same order.

    Differences are resampled prompt by prompt, so that what makes a prompt easy for both cancels. Pairs that
    lack an outcome in either list are left out. An interval that does not contain 0: not by chance.
    """
    if len(before) != len(after):
        raise BadInputError(f"paired_rise: {len(before)} verdicts before, {len(after)} after, not the same")
    pairs = [(b.outcome, a.outcome) for b, a in zip(before, after, strict=True)]
    rises = np.array([a - b for b, a in pairs if b is not None and a is not None])
    return bootstrap_mean(rises, confidence=confidence, num_resamples=num_resamples, seed=seed)


def bootstrap_mean(
    values: np.ndarray, *, confidence: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Mean of float64 [n] and its percentile bootstrap interval (Efron 1979); the same for the same seed."""
    check_number("confidence", confidence, above=0.0)
    if confidence >= 1:
        raise BadInputError(f"confidence={confidence}: must be below 1, for example 0.95.")
    if not isinstance(num_resamples, int) or num_resamples < 1:
        raise BadInputError(f"num_resamples={num_resamples!r}: must be a whole number, at least 1.")
    if len(values) == 0:
        raise BadInputError("bootstrap: there are no values to resample.")
    if len(values) == 1:  # resampled, it is always itself; SciPy asks for two
        return Interval(float(values[0]), float(values[0]), float(values[0]))
    low, high = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=num_resamples,
        confidence_level=confidence,
        method="percentile",
        batch=max(1, MOST_DRAWN // len(values)),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(values.mean()), float(low), float(high))
