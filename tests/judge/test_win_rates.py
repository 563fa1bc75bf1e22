"""Verdicts in both orders, what they count as, and the bootstrap, against numbers by hand."""

import math

import numpy as np
import pytest

from rl_cluster.errors import BadInputError, ScorerError
from rl_cluster.judge import (
    PairVerdict,
    bootstrap_mean,
    count_verdicts,
    judge_pairs,
    judged_win_rate,
    paired_rise,
    score_judge,
)


def longer(prompts, first, second):
    return [0.5 if len(a) == len(b) else float(len(a) > len(b)) for a, b in zip(first, second, strict=True)]


def always_first(prompts, first, second):
    return [1.0] * len(prompts)


PROMPTS = ["p", "q", "r", "s"]
CANDIDATE = ["long", "x", "ab", "abc"]
REFERENCE = ["x", "long", "cd", "a"]


def outcomes(verdicts):
    return [v.outcome for v in verdicts]


def test_every_pair_is_judged_in_both_orders():
    asked = []

    def judge(prompts, first, second):
        asked.append((list(prompts), list(first), list(second)))
        return longer(prompts, first, second)

    verdicts = judge_pairs(judge, PROMPTS, CANDIDATE, REFERENCE)
    assert asked == [(PROMPTS, CANDIDATE, REFERENCE), (PROMPTS, REFERENCE, CANDIDATE)]
    assert outcomes(verdicts) == [1.0, 0.0, 0.5, 1.0]
    assert verdicts[0] == PairVerdict(1.0, 1.0, True)
    assert verdicts[1] == PairVerdict(0.0, 0.0, True)


def test_a_liking_for_a_place_cancels_and_is_reported():
    rate = judged_win_rate(always_first, PROMPTS, CANDIDATE, REFERENCE)
    assert (rate.rate.mean, rate.wins, rate.ties, rate.losses) == (0.5, 0, 4, 0)
    assert (rate.first_place_rate, rate.agreement) == (1.0, 0.0)
    once = judged_win_rate(always_first, PROMPTS, CANDIDATE, REFERENCE, swap=False)
    assert (once.rate.mean, once.wins) == (1.0, 4)
    assert (once.first_place_rate, once.agreement) == (None, None)


def test_wins_ties_losses_and_the_rate():
    rate = judged_win_rate(longer, PROMPTS, CANDIDATE, REFERENCE)
    assert (rate.wins, rate.ties, rate.losses, rate.failures, rate.num_pairs) == (2, 1, 1, 0, 4)
    assert rate.rate.mean == pytest.approx(2.5 / 4)
    assert (rate.first_place_rate, rate.agreement) == (0.5, 1.0)
    assert str(rate).startswith("win rate 62.5 % [")
    assert str(rate).endswith("2 wins, 1 ties, 1 losses, 0 without a verdict")


def test_probabilities_count_as_such_and_disagreement_counts_half():
    verdicts = [PairVerdict(0.9, 0.5, True), PairVerdict(1.0, 0.0, True), PairVerdict(0.2, 0.1, True)]
    rate = count_verdicts(verdicts)
    assert outcomes(verdicts) == pytest.approx([0.7, 0.5, 0.15])
    assert rate.rate.mean == pytest.approx((0.7 + 0.5 + 0.15) / 3)
    assert (rate.wins, rate.ties, rate.losses) == (1, 1, 1)
    # In first place the judge gave 0.9, 1, 0.2 to the candidate and 0.5, 1, 0.9 to the reference.
    assert rate.first_place_rate == pytest.approx((0.9 + 1 + 0.2 + 0.5 + 1 + 0.9) / 6)
    assert rate.agreement == pytest.approx(1 / 3)


def test_pairs_without_an_answer_count_nowhere_and_too_many_stop():
    verdicts = [PairVerdict(None, 1.0, True), PairVerdict(1.0, None, True), PairVerdict(1.0, 1.0, True)]
    rate = count_verdicts(verdicts)
    assert (rate.rate.mean, rate.wins, rate.failures, rate.first_place_rate) == (1.0, 1, 2, 0.5)

    def silent_once(prompts, first, second):
        return [None] + [1.0] * (len(prompts) - 1)

    with pytest.raises(ScorerError, match=r"no verdict on 1 of 4 pairs; max_failure_rate is 0\.1"):
        judged_win_rate(silent_once, PROMPTS, CANDIDATE, REFERENCE)
    allowed = judged_win_rate(silent_once, PROMPTS, CANDIDATE, REFERENCE, max_failure_rate=0.25)
    assert (allowed.failures, allowed.num_pairs) == (1, 3)
    with pytest.raises(ScorerError, match="no verdict on 4 of 4"):
        judged_win_rate(lambda p, a, b: [None] * 4, PROMPTS, CANDIDATE, REFERENCE, max_failure_rate=1.0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [([1.0], "answered 1 verdicts for 4 pairs"), ([2.0] * 4, "2.0"), ([math.nan] * 4, "nan")],
)
def test_a_judge_that_answers_nonsense_is_an_error(answer, message):
    with pytest.raises(ScorerError, match=message):
        judge_pairs(lambda p, a, b: answer, PROMPTS, CANDIDATE, REFERENCE)


@pytest.mark.parametrize(
    ("prompts", "reference"), [([], []), (PROMPTS, REFERENCE[:3]), (PROMPTS[:3], REFERENCE)]
)
def test_lists_of_unequal_length_are_named(prompts, reference):
    with pytest.raises(BadInputError, match=f"{len(prompts)} prompts"):
        judge_pairs(longer, prompts, CANDIDATE[: 4 if prompts else 0], reference)


def test_the_interval_agrees_with_the_binomial_distribution():
    """300 wins of 500: the standard error is sqrt(0.6 · 0.4 / 500)."""
    values = np.array([1.0] * 300 + [0.0] * 200)
    error = math.sqrt(0.6 * 0.4 / 500)
    wide = bootstrap_mean(values, seed=1)
    assert wide.mean == pytest.approx(0.6)
    assert (wide.low, wide.high) == pytest.approx((0.6 - 1.96 * error, 0.6 + 1.96 * error), abs=0.004)
    narrow = bootstrap_mean(values, confidence=0.5, seed=1)
    assert (narrow.low, narrow.high) == pytest.approx((0.6 - 0.674 * error, 0.6 + 0.674 * error), abs=0.003)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        interval = bootstrap_mean(rng.random(60), confidence=0.9, num_resamples=300, seed=seed)
        covered += interval.low <= 0.5 <= interval.high
    assert 0.82 <= covered / 200 <= 0.96


def test_the_bootstrap_is_the_same_for_the_same_seed_only():
    values = np.linspace(0, 1, 20)
    first, same, other = (bootstrap_mean(values, num_resamples=200, seed=seed) for seed in (1, 1, 2))
    assert first == same
    assert (first.low, first.high) != (other.low, other.high)


def test_a_paired_rise_is_much_sharper_than_two_rates():
    """Hard and easy prompts, every one of them judged 0.1 better afterwards."""
    levels = np.linspace(0.0, 0.9, 30)
    before = [PairVerdict(v, None, False) for v in levels]
    after = [PairVerdict(v + 0.1, None, False) for v in levels]
    rise = paired_rise(before, after)
    assert (rise.mean, rise.low, rise.high) == pytest.approx((0.1, 0.1, 0.1))
    worse = paired_rise(after, before)
    assert worse.mean == pytest.approx(-0.1)
    mixed = paired_rise([PairVerdict(None, None, False), *before], [PairVerdict(1.0, None, False), *after])
    assert mixed.mean == pytest.approx(0.1)
    with pytest.raises(BadInputError, match="30 verdicts before, 29 after"):
        paired_rise(before, after[1:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"confidence": 0.0}, "confidence"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"num_resamples": 0}, "num_resamples=0"),
        ({"values": np.array([])}, "no values"),
    ],
)
def test_bootstrap_settings_that_cannot_work_are_named(settings, message):
    with pytest.raises(BadInputError, match=message):
        bootstrap_mean(**({"values": np.ones(3)} | settings))


def test_a_reward_model_judges_prompt_and_response_with_a_margin_for_ties():
    seen = []

    def scores(texts):
        seen.append(texts)
        return [float(len(text)) for text in texts]

    judge = score_judge(scores, tie_margin=1.0)
    assert judge(["pp", "q", "r"], ["abc", "a", "abcd"], ["a", "abc", "abc"]) == [1.0, 0.0, 0.5]
    assert seen == [["ppabc", "qa", "rabcd"], ["ppa", "qabc", "rabc"]]
    assert score_judge(scores)(["p"], ["abc"], ["ab"]) == [1.0]
    assert score_judge(scores)(["p"], ["ab"], ["ab"]) == [0.5]
    with pytest.raises(BadInputError, match="tie_margin"):
        score_judge(scores, tie_margin=-1.0)
    with pytest.raises(BadInputError, match="judge is int"):
        score_judge(3)
