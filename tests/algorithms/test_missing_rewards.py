"""Rows without a reward (NaN): advantage 0, and everybody else as if they were not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_cluster.algorithms.rules import (
    AdvantageInputs,
    grpo_advantages,
    ppo_advantages,
    reinforce_advantages,
    rloo_advantages,
)
from rl_cluster.algorithms.sampling import has_signal
from rl_cluster.batch import TokenBatch
from rl_cluster.config.algorithm import GRPO, PPO, RLOO, KLConfig, Reinforce

NONE = float("nan")
GROUPS = np.array([5, 8, 5, 8, 5, 8, 5, 8])
SCORES = np.array([1.0, NONE, 4.0, 0.5, NONE, NONE, -2.0, NONE])
"""Group 5 has three rewards, group 8 has one."""
KNOWN = ~np.isnan(SCORES)
COUNTS = (3, 1, 4, 2, 2, 1, 3, 2)


def a_batch(rows: np.ndarray) -> TokenBatch:
    """The chosen rows of eight; every row has one prompt token and COUNTS actions."""
    random = np.random.default_rng(0)
    columns = [random.normal(size=(3, count + 1)).astype(np.float32) for count in COUNTS]
    chosen = [i for i in range(8) if rows[i]]
    lengths = np.array([COUNTS[i] + 1 for i in chosen])
    mask = np.concatenate([[False] + [True] * COUNTS[i] for i in chosen])
    behaviour, reference, values = np.concatenate([columns[i] for i in chosen], axis=1)
    return TokenBatch(
        tokens=np.arange(len(mask), dtype=np.int32),
        lengths=lengths.astype(np.int32),
        action_mask=mask,
        units=np.arange(len(chosen), dtype=np.int32),
        group_ids=GROUPS[rows].astype(np.int32),
        behaviour_logprobs=behaviour,
        proximal_logprobs=behaviour,
        reference_logprobs=reference,
        values=values,
    )


def kl(place: str) -> KLConfig:
    return KLConfig(coef=0.05, place=place, estimator="k1")


EVERY = np.ones(8, dtype=bool)
RULES: list[tuple[Any, Any]] = [
    (grpo_advantages, GRPO(kl=kl("loss"))),
    (grpo_advantages, GRPO(kl=kl("loss"), scale="batch")),
    (grpo_advantages, GRPO(kl=kl("reward_token"), scale="none")),
    (rloo_advantages, RLOO(kl=kl("reward_sequence"))),
    (rloo_advantages, RLOO(kl=kl("reward_token"), whiten_rewards=True, normalize_advantage=True)),
    (reinforce_advantages, Reinforce(kl=kl("reward_token"), baseline="group_mean")),
    (reinforce_advantages, Reinforce(kl=kl("reward_token"))),
    (ppo_advantages, PPO(kl=kl("reward_token"), whiten_rewards=True)),
]


@pytest.mark.parametrize(("rule", "config"), RULES)
def test_rows_with_a_reward_get_what_they_get_where_the_others_are_not_in_the_batch(
    rule: Any, config: Any
) -> None:
    """Of group 5, three rewards; group 8 is left out, for a group of one is refused."""
    five = GROUPS == 5
    alone = rule(config, AdvantageInputs(a_batch(five & KNOWN), SCORES[five & KNOWN], 0.25))
    batch = a_batch(five)
    mixed = rule(config, AdvantageInputs(batch, SCORES[five], 0.25))
    kept = KNOWN[five][batch.row_of_token]
    assert np.isfinite(mixed.advantages).all()
    assert mixed.advantages[~kept].tolist() == [0.0] * int((~kept).sum())
    assert mixed.advantages[kept] == pytest.approx(alone.advantages, abs=1e-6)
    assert np.abs(alone.advantages).max() > 0.1
    if mixed.returns is not None:
        assert mixed.returns[kept] == pytest.approx(alone.returns, abs=1e-6)
        drawn = ~kept & batch.action_mask
        assert mixed.returns[drawn] == pytest.approx(batch.values[drawn]), "the critic learns nothing there"


@pytest.mark.parametrize(("rule", "config"), RULES[:5])
def test_a_reward_that_is_alone_in_its_group_has_no_baseline_and_no_advantage(rule: Any, config: Any) -> None:
    batch = a_batch(EVERY)
    if config.kl.place != "loss":
        config = config.model_copy(update={"kl": KLConfig(coef=0.0)})
    if getattr(config, "normalize_advantage", False):
        config = config.model_copy(update={"normalize_advantage": False})
    advantages = rule(config, AdvantageInputs(batch, SCORES, 0.0)).advantages
    eight = (GROUPS == 8)[batch.row_of_token]
    assert advantages[eight].tolist() == [0.0] * int(eight.sum())
    assert np.abs(advantages[~eight]).max() > 0.1


@pytest.mark.parametrize(("rule", "config"), RULES)
def test_a_batch_without_any_reward_has_no_advantages(rule: Any, config: Any) -> None:
    result = rule(config, AdvantageInputs(a_batch(EVERY), np.full(8, NONE), 0.25))
    assert not result.advantages.any()


def test_a_score_of_infinity_is_still_a_fault() -> None:
    with pytest.raises(AssertionError, match="infinite"):
        grpo_advantages(GRPO(), AdvantageInputs(a_batch(EVERY), np.full(8, np.inf), 0.0))


def test_a_group_has_signal_only_if_two_of_its_rewards_differ() -> None:
    assert has_signal(np.array([1.0, NONE, 2.0]))
    assert not has_signal(np.array([1.0, NONE, 1.0]))
    assert not has_signal(np.array([1.0, NONE, NONE]))
    assert not has_signal(np.array([NONE, NONE]))
