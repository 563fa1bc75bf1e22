"""From a scored batch to advantages, for every algorithm, against loops over rows."""

import numpy as np
import pytest

from rl_cluster.algorithms.rules import (
    AdvantageInputs,
    grpo_advantages,
    ppo_advantages,
    reinforce_advantages,
    rloo_advantages,
)
from rl_cluster.batch import TokenBatch
from rl_cluster.config.algorithm import GRPO, PPO, RLOO, KLConfig, Reinforce
from rl_cluster.errors import BadInputError

PROMPT = 2
COUNTS = (3, 1, 4, 2)
GROUPS = (5, 8, 5, 8)
SCORES = np.array([1.0, -2.0, 4.0, 0.5])
BETA = 0.25


def a_batch(reference=True, values=False, proximal=True):
    """Four rows of 2 prompt tokens and COUNTS actions. Columns are 9 at the prompt: nobody may look there."""
    random = np.random.default_rng(3)
    lengths = np.array(COUNTS) + PROMPT
    mask = np.concatenate([[False] * PROMPT + [True] * count for count in COUNTS])

    def column():
        return np.where(mask, random.normal(size=len(mask)), 9.0).astype(np.float32)

    return TokenBatch(
        tokens=np.arange(len(mask), dtype=np.int32),
        lengths=lengths.astype(np.int32),
        action_mask=mask,
        units=np.arange(4, dtype=np.int32),
        group_ids=np.array(GROUPS, dtype=np.int32),
        behaviour_logprobs=column(),
        proximal_logprobs=column() if proximal else None,
        reference_logprobs=column() if reference else None,
        values=column() if values else None,
    )


def rows_of(batch, column):
    """The actions of each row as a list of float64 arrays."""
    pieces = np.split(np.asarray(column, dtype=np.float64), batch.offsets[1:-1])
    return [piece[PROMPT:] for piece in pieces]


def laid_out(rows):
    return np.concatenate([np.concatenate([np.zeros(PROMPT), row]) for row in rows])


def kl_rows(batch, policy="proximal_logprobs"):
    return [
        p - r
        for p, r in zip(
            rows_of(batch, getattr(batch, policy)), rows_of(batch, batch.reference_logprobs), strict=True
        )
    ]


def whitened(rows):
    everything = np.concatenate(rows)
    return [(row - everything.mean()) / np.sqrt(everything.var(ddof=1) + 1e-8) for row in rows]


def kl(place, coef=0.05, estimator="k1"):
    return KLConfig(coef=coef, place=place, estimator=estimator)


def token_rewards(batch, place="reward_token", scores=SCORES):
    rows = [-BETA * each if place == "reward_token" else 0.0 * each for each in kl_rows(batch)]
    for row, score, each in zip(rows, scores, kl_rows(batch), strict=True):
        row[-1] += score - (BETA * each.sum() if place == "reward_sequence" else 0.0)
    return rows


def loop_gae(rewards, values, gamma, lam):
    advantages, ahead = np.zeros(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = values[t + 1] if t + 1 < len(rewards) else 0.0
        ahead = rewards[t] + gamma * following - values[t] + gamma * lam * ahead
        advantages[t] = ahead
    return advantages


@pytest.mark.parametrize("place", ["reward_token", "reward_sequence", "loss"])
def test_ppo_runs_gae_on_the_score_at_the_last_token_and_the_penalty_where_it_belongs(place):
    batch = a_batch(values=True)
    config = PPO(gamma=0.9, lam=0.8, whiten_advantages=False, kl=kl(place))
    out = ppo_advantages(config, AdvantageInputs(batch, SCORES, BETA))
    values = rows_of(batch, batch.values)
    expected = [loop_gae(r, v, 0.9, 0.8) for r, v in zip(token_rewards(batch, place), values, strict=True)]
    np.testing.assert_allclose(out.advantages, laid_out(expected), rtol=1e-5, atol=1e-6)
    returns = [a + v for a, v in zip(expected, values, strict=True)]
    np.testing.assert_allclose(out.returns, laid_out(returns), rtol=1e-5, atol=1e-6)
    assert out.advantages.dtype == out.returns.dtype == np.float32


@pytest.mark.parametrize("place", ["reward_token", "reward_sequence"])
def test_the_exact_divergence_takes_the_place_of_the_estimate(place):
    batch = a_batch(values=True)
    exact = laid_out([np.arange(1.0, count + 1) for count in COUNTS])
    out = ppo_advantages(
        PPO(kl=kl(place, estimator="exact")),
        AdvantageInputs(batch.with_columns(exact_kl=exact.astype(np.float32)), SCORES, BETA),
    )
    sums = np.array([count * (count + 1) / 2 for count in COUNTS])
    np.testing.assert_allclose(out.kl, sums)
    np.testing.assert_allclose(out.non_score_reward, -BETA * sums)


def test_ppo_whitens_advantages_after_the_returns_were_made():
    batch = a_batch(values=True)
    inputs = AdvantageInputs(batch, SCORES, BETA)
    plain = ppo_advantages(PPO(whiten_advantages=False), inputs)
    out = ppo_advantages(PPO(), inputs)
    np.testing.assert_array_equal(out.returns, plain.returns)
    np.testing.assert_allclose(
        out.advantages, laid_out(whitened(rows_of(batch, plain.advantages))), rtol=1e-5, atol=1e-6
    )


def test_ppo_whitens_rewards_in_scale_and_keeps_their_mean():
    batch = a_batch(values=True)
    rewards = token_rewards(batch)
    mean = np.concatenate(rewards).mean()
    rewards = [row + mean for row in whitened(rewards)]
    config = PPO(gamma=0.9, lam=0.8, whiten_rewards=True, whiten_advantages=False)
    out = ppo_advantages(config, AdvantageInputs(batch, SCORES, BETA))
    expected = [loop_gae(r, v, 0.9, 0.8) for r, v in zip(rewards, rows_of(batch, batch.values), strict=True)]
    np.testing.assert_allclose(out.advantages, laid_out(expected), rtol=1e-5, atol=1e-6)


def test_rloo_takes_the_penalised_score_minus_that_of_the_other_sample():
    batch = a_batch()
    out = rloo_advantages(RLOO(), AdvantageInputs(batch, SCORES, BETA))
    total = SCORES - BETA * np.array([row.sum() for row in kl_rows(batch)])
    per_row = [total[0] - total[2], total[1] - total[3], total[2] - total[0], total[3] - total[1]]
    expected = laid_out([np.full(count, a) for count, a in zip(COUNTS, per_row, strict=True)])
    np.testing.assert_allclose(out.advantages, expected, rtol=1e-5, atol=1e-6)
    assert out.returns is None


def test_rloo_reports_kl_and_non_score_reward_with_the_signs_of_the_code():
    batch = a_batch()
    out = rloo_advantages(RLOO(), AdvantageInputs(batch, SCORES, BETA))
    sums = np.array([row.sum() for row in kl_rows(batch)])
    np.testing.assert_allclose(out.kl, sums, rtol=1e-6)
    np.testing.assert_allclose(out.non_score_reward, -BETA * sums, rtol=1e-6)


def test_rloo_with_token_level_kl_charges_each_token_for_what_comes_from_it_on():
    batch = a_batch()
    out = rloo_advantages(RLOO(kl=kl("reward_token")), AdvantageInputs(batch, SCORES, BETA))
    charges = kl_rows(batch)

    def to_go(row, t):
        return SCORES[row] - BETA * charges[row][t:].sum()

    partner = {0: 2, 2: 0, 1: 3, 3: 1}
    rows = [np.array([to_go(i, t) - to_go(partner[i], t) for t in range(COUNTS[i])]) for i in range(4)]
    np.testing.assert_allclose(out.advantages, laid_out(rows), rtol=1e-5, atol=1e-6)
    sequence = rloo_advantages(RLOO(), AdvantageInputs(batch, SCORES, BETA))
    np.testing.assert_allclose(out.advantages[PROMPT], sequence.advantages[PROMPT], rtol=1e-5)
    np.testing.assert_allclose(out.non_score_reward, sequence.non_score_reward)


def test_rloo_whitens_rewards_over_rows_and_normalises_advantages_after_leave_one_out():
    batch = a_batch(reference=False)
    free = KLConfig(place="reward_sequence", estimator="k1")
    scaled = SCORES / np.sqrt(SCORES.var(ddof=1) + 1e-8)
    out = rloo_advantages(RLOO(whiten_rewards=True, kl=free), AdvantageInputs(batch, SCORES, 0.0))
    np.testing.assert_allclose(out.advantages[PROMPT], scaled[0] - scaled[2], rtol=1e-5)
    out = rloo_advantages(RLOO(normalize_advantage=True, kl=free), AdvantageInputs(batch, SCORES, 0.0))
    raw = np.array([-3.0, -2.5, 3.0, 2.5])
    normal = (raw - raw.mean()) / raw.std(ddof=1)
    expected = laid_out([np.full(count, a) for count, a in zip(COUNTS, normal, strict=True)])
    np.testing.assert_allclose(out.advantages, expected, rtol=1e-5)


def test_grpo_normalises_each_group_and_leaves_the_kl_to_the_loss():
    batch = a_batch()
    out = grpo_advantages(GRPO(kl=KLConfig(coef=0.04)), AdvantageInputs(batch, SCORES, 0.04))
    std_5, std_8 = 3 / 2**0.5 + 1e-4, 2.5 / 2**0.5 + 1e-4
    per_row = [-1.5 / std_5, -1.25 / std_8, 1.5 / std_5, 1.25 / std_8]
    expected = laid_out([np.full(count, a) for count, a in zip(COUNTS, per_row, strict=True)])
    np.testing.assert_allclose(out.advantages, expected, rtol=1e-5)
    assert (out.non_score_reward == 0).all()
    d = kl_rows(batch)
    np.testing.assert_allclose(out.kl, [(np.exp(-row) - 1 + row).sum() for row in d], rtol=1e-5)


def test_grpo_with_a_sequence_penalty_normalises_the_penalised_score():
    batch = a_batch()
    config = GRPO(scale="none", kl=kl("reward_sequence"))
    out = grpo_advantages(config, AdvantageInputs(batch, SCORES, BETA))
    total = SCORES - BETA * np.array([row.sum() for row in kl_rows(batch)])
    assert out.advantages[PROMPT] == pytest.approx((total[0] - total[2]) / 2, rel=1e-5)


def test_grpo_with_a_token_penalty_divides_by_the_deviation_of_the_whole_rewards():
    batch = a_batch()
    out = grpo_advantages(GRPO(kl=kl("reward_token")), AdvantageInputs(batch, SCORES, BETA))
    charges = kl_rows(batch)
    total = SCORES - BETA * np.array([row.sum() for row in charges])
    std = abs(total[0] - total[2]) / 2**0.5 + 1e-4
    last = SCORES[0] - BETA * charges[0][2]
    other = SCORES[2] - BETA * charges[2][2:].sum()
    assert out.advantages[PROMPT + 2] == pytest.approx((last - other) / 2 / std, rel=1e-5)


@pytest.mark.parametrize("baseline", ["none", "group_mean"])
def test_reinforce_discounts_token_rewards_and_whitens_them_over_the_batch(baseline):
    batch = a_batch()
    inputs = AdvantageInputs(batch, SCORES, BETA)
    means = np.array([2.5, -0.75, 2.5, -0.75])
    scores = SCORES - means if baseline == "group_mean" else SCORES
    expected = []
    for row in token_rewards(batch, scores=scores):
        expected.append(
            np.array([sum(0.9 ** (u - t) * row[u] for u in range(t, len(row))) for t in range(len(row))])
        )
    plain = reinforce_advantages(Reinforce(gamma=0.9, baseline=baseline, whiten_advantages=False), inputs)
    np.testing.assert_allclose(plain.advantages, laid_out(expected), rtol=1e-5, atol=1e-6)
    out = reinforce_advantages(Reinforce(gamma=0.9, baseline=baseline), inputs)
    np.testing.assert_allclose(out.advantages, laid_out(whitened(expected)), rtol=1e-5, atol=1e-6)


def test_without_a_pass_before_the_update_the_behaviour_stands_for_the_policy():
    batch = a_batch(proximal=False)
    out = rloo_advantages(RLOO(), AdvantageInputs(batch, SCORES, BETA))
    np.testing.assert_allclose(out.kl, [row.sum() for row in kl_rows(batch, "behaviour_logprobs")], rtol=1e-6)


def test_without_a_reference_there_is_no_kl_and_a_penalty_is_an_error():
    batch = a_batch(reference=False)
    out = grpo_advantages(GRPO(), AdvantageInputs(batch, SCORES, 0.0))
    assert out.kl is None
    assert (out.non_score_reward == 0).all()
    with pytest.raises(AssertionError, match="reference"):
        rloo_advantages(RLOO(), AdvantageInputs(batch, SCORES, BETA))


def test_a_log_probability_of_minus_infinity_on_both_sides_costs_nothing():
    batch = a_batch()
    first = PROMPT
    columns = {name: getattr(batch, name).copy() for name in ("proximal_logprobs", "reference_logprobs")}
    for column in columns.values():
        column[first] = -np.inf
    out = rloo_advantages(RLOO(), AdvantageInputs(batch.with_columns(**columns), SCORES, BETA))
    assert np.isfinite(out.advantages).all()
    assert out.kl[0] == pytest.approx(kl_rows(batch)[0][1:].sum(), rel=1e-5)


def test_one_sample_per_prompt_is_refused_by_algorithms_with_a_group_baseline():
    batch = a_batch(reference=False)
    lonely = batch.with_columns(group_ids=np.array([1, 1, 1, 2], dtype=np.int32))
    for rule, config in ((rloo_advantages, RLOO(kl=KLConfig())), (grpo_advantages, GRPO())):
        with pytest.raises(BadInputError, match="group 2 has 1 sample"):
            rule(config, AdvantageInputs(lonely, SCORES, 0.0))
