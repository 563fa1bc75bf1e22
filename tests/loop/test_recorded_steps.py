"""What the loop asks of its learners: a fake records every step, at lag 0 and 1, and after a resume."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_cluster.algorithms.steps import PolicyStep, ValueStep
from rl_cluster.config.algorithm import PolicyLossConfig
from rl_cluster.loop.state import LoopState, newest_checkpoint
from rl_cluster.protocols import OptimParams
from tests.fakes import Asked, FakeLearner
from tests.loop.test_loop import Rig, make_config

LAGS = pytest.mark.parametrize("lag", [0, 1])
EVERY_LOSS_SETTING = {
    "kind": "sapo",
    "ratio": "sequence_mean",
    "clip_low": 0.11,
    "clip_high": 0.33,
    "temperature_positive": 1.2,
    "temperature_negative": 1.7,
    "aggregation": "constant",
    "entropy_coef": 0.013,
    "mask_truncated": True,
}
ADAPTIVE = {"controller": "adaptive", "target": 0.023, "horizon": 500}


def rig(folder: Path, lag: int = 0, options: dict[str, Any] | None = None, **sections: Any) -> Rig:
    asynchrony = {"max_policy_lag": lag, **sections.pop("asynchrony", {})}
    return Rig(make_config(**{"async": asynchrony}, **sections), folder, **(options or {}))


def by_step(asked: list[Asked], updates_per_step: int) -> list[list[Asked]]:
    assert len(asked) % updates_per_step == 0
    return [asked[i : i + updates_per_step] for i in range(0, len(asked), updates_per_step)]


def coefs(rows: dict[int, Any]) -> list[float]:
    return [rows[step]["objective/kl_coef"] for step in sorted(rows) if step > 0]


@LAGS
def test_every_setting_of_the_loss_reaches_every_update(tmp_path: Path, lag: int) -> None:
    configured = PolicyLossConfig(**EVERY_LOSS_SETTING)  # type: ignore[arg-type]
    defaults = PolicyLossConfig()
    assert all(getattr(configured, name) != getattr(defaults, name) for name in EVERY_LOSS_SETTING)
    assert set(EVERY_LOSS_SETTING) == set(PolicyLossConfig.model_fields)
    run = rig(
        tmp_path,
        lag,
        asynchrony={"importance_cap": 1.7},
        algorithm={
            "name": "grpo",
            "num_epochs": 2,
            "kl": {"coef": 0.04, "estimator": "k2"},
            "loss": EVERY_LOSS_SETTING,
        },
        rollout={"temperature": 0.7},
    )
    run.run()
    assert len(run.learner.asked) == 6 * 2
    for asked in run.learner.asked:
        assert isinstance(asked.step, PolicyStep)
        assert asked.step.loss == configured
        assert asked.step.temperature == 0.7
        assert (asked.step.kl_coef, asked.step.kl_estimator) == (0.04, "k2")
        assert asked.step.train_policy
        assert asked.step.value_coef == 0.0
        if lag:
            assert asked.step.importance_cap == 1.7


def test_without_lag_nothing_is_corrected_by_default(tmp_path: Path) -> None:
    run = rig(tmp_path)
    run.run()
    assert {asked.step.importance_cap for asked in run.learner.asked} == {None}
    lagging = rig(tmp_path / "lag", lag=1)
    lagging.run()
    assert {asked.step.importance_cap for asked in lagging.learner.asked} == {2.0}


@LAGS
@pytest.mark.parametrize("place", ["reward_token", "reward_sequence"])
def test_a_penalty_in_the_reward_is_not_in_the_loss_as_well(tmp_path: Path, lag: int, place: str) -> None:
    run = rig(tmp_path, lag, algorithm={"name": "grpo", "kl": {"coef": 0.4, "place": place}})
    run.run()
    assert {asked.step.kl_coef for asked in run.learner.asked} == {0.0}
    assert any(row["objective/non_score_reward"] != 0 for step, row in run.observer.rows.items() if step > 1)


@LAGS
@pytest.mark.parametrize("place", ["loss", "reward_sequence"])
def test_an_adaptive_coefficient_follows_the_divergence_of_every_sequence(
    tmp_path: Path, lag: int, place: str
) -> None:
    """Ziegler et al. 2019: n counts the samples of a step (4 groups of 8), and no β changes within a step."""
    kl = {"coef": 0.1, "place": place, "estimator": "k2", **ADAPTIVE}
    algorithm = {"name": "rloo", "num_epochs": 2, "num_mini_batches": 2, "kl": kl}
    run = rig(tmp_path, lag, {"learner": FakeLearner(0.1)}, algorithm=algorithm)
    run.run()
    expected = [0.1]
    for step in range(1, 6):
        divergence = run.observer.rows[step]["objective/kl"]
        assert divergence is not None
        error = min(0.2, max(-0.2, divergence / 0.023 - 1))
        expected.append(expected[-1] * (1 + error * 32 / 500))
    assert len({round(b / a, 6) for a, b in itertools.pairwise(expected)}) > 2
    assert coefs(run.observer.rows) == pytest.approx(expected)
    for beta, updates in zip(expected, by_step(run.learner.asked, 4), strict=True):
        in_loss = beta if place == "loss" else 0.0
        assert [asked.step.kl_coef for asked in updates] == pytest.approx([in_loss] * 4)
    if place == "reward_sequence":
        for step, beta in enumerate(expected, start=1):
            row = run.observer.rows[step]
            assert row["objective/non_score_reward"] == pytest.approx(-beta * row["objective/kl"])


@LAGS
def test_the_coefficient_of_now_is_what_the_advantages_are_made_with(tmp_path: Path, lag: int) -> None:
    """RLOO by hand, from the batch that the learner was given: score − β Σ log(π/ref), less the others'."""
    kl = {"coef": 0.1, "place": "reward_sequence", "estimator": "k1", **ADAPTIVE, "target": 0.001}
    run = rig(tmp_path, lag, algorithm={"name": "rloo", "num_epochs": 2, "kl": kl})
    run.run()
    betas = coefs(run.observer.rows)
    assert len(set(betas)) == 6
    for beta, (asked, _) in zip(betas, by_step(run.learner.asked, 2), strict=True):
        batch = asked.batch
        rows = batch.row_of_token
        ones = np.bincount(rows, weights=(batch.tokens == 1) & batch.action_mask)
        assert batch.proximal_logprobs is not None and batch.reference_logprobs is not None
        ratio = (batch.proximal_logprobs - batch.reference_logprobs) * batch.action_mask
        rewards = ones - beta * np.bincount(rows, weights=ratio)
        assert batch.advantages is not None
        for row in range(batch.num_rows):
            others = (batch.group_ids == batch.group_ids[row]) & (np.arange(batch.num_rows) != row)
            expected = rewards[row] - rewards[others].mean()
            own = batch.advantages[(rows == row) & batch.action_mask]
            assert np.allclose(own, expected, atol=1e-5)


def test_a_resumed_run_asks_for_what_the_whole_run_would_have_asked(tmp_path: Path) -> None:
    """β, rows and warm-up of step 3 onwards: nothing starts again at step 1 or at the configured β."""
    kl = {"coef": 0.1, "place": "loss", **ADAPTIVE, "target": 0.001}
    settings: dict[str, Any] = {
        "algorithm": {"name": "ppo", "num_epochs": 2, "num_mini_batches": 2, "kl": kl}
        | {"critic": {"warmup_steps": 3}},
        "checkpoint": {"every": 2},
    }
    whole = rig(tmp_path / "whole", **settings)
    whole.run()
    first = rig(tmp_path / "half", run={"steps": 2}, **settings)
    first.run()
    folder = newest_checkpoint(tmp_path / "half" / "checkpoints")
    second = rig(tmp_path / "half", options={"resume": LoopState.read(folder)}, **settings)
    asyncio.run(second.learner.load(folder / "learner"))
    second.run()
    there, here = whole.learner.asked[2 * 4 :], second.learner.asked
    assert [asked.step for asked in here] == [asked.step for asked in there]
    assert [asked.rows for asked in here] == [asked.rows for asked in there]
    assert len({asked.step.kl_coef for asked in here}) == 4
    assert [updates[0].step.train_policy for updates in by_step(here, 4)] == [False, True, True, True]
    for ours, theirs in zip(here, there, strict=True):
        for column in fields(ours.batch):
            assert np.array_equal(getattr(ours.batch, column.name), getattr(theirs.batch, column.name))


@LAGS
def test_every_epoch_is_cut_anew_into_mini_batches_of_all_rows(tmp_path: Path, lag: int) -> None:
    algorithm = {"name": "grpo", "num_epochs": 3, "num_mini_batches": 4}
    run = rig(tmp_path, lag, algorithm=algorithm)
    run.run()
    assert run.learner.calls.count("optim_step") == 6 * 12
    epochs = [
        updates[i : i + 4] for updates in by_step(run.learner.asked, 12) for i in range(0, len(updates), 4)
    ]
    for epoch in epochs:
        assert [len(asked.rows) for asked in epoch] == [8, 8, 8, 8]
        assert sorted(row for asked in epoch for row in asked.rows) == list(range(32))
    assert len({tuple(asked.rows for asked in epoch) for epoch in epochs}) == 18
    other = rig(tmp_path / "other", lag, algorithm=algorithm, run={"steps": 6, "seed": 1})
    other.run()
    assert other.learner.asked[0].rows != run.learner.asked[0].rows


def test_one_update_takes_all_rows_in_their_order(tmp_path: Path) -> None:
    run = rig(tmp_path)
    run.run()
    assert [asked.rows for asked in run.learner.asked] == [tuple(range(32))] * 6
    assert run.learner.calls == ["forward_backward", "optim_step"] * 6


@LAGS
def test_no_update_of_a_run_has_a_learning_rate_of_its_own(tmp_path: Path, lag: int) -> None:
    """The schedule is the learner's: what the loop hands over with optim_step would replace it."""
    run = rig(tmp_path, lag, algorithm={"name": "grpo", "num_epochs": 2})
    run.run()
    assert len(run.learner.optim_params) == 12
    assert all(params in (None, OptimParams()) for params in run.learner.optim_params)
    assert run.observer.rows[6]["lr"] == 0.5


@LAGS
def test_a_separate_critic_learns_from_its_own_values_and_the_policy_waits_for_it(
    tmp_path: Path, lag: int
) -> None:
    critic = FakeLearner()
    critic.value = 0.25
    settings = {"separate": True, "clip_value": 0.07, "warmup_steps": 2, "value_coef": 0.9}
    algorithm = {"name": "ppo", "num_epochs": 2, "critic": settings, "gamma": 0.9, "lam": 0.8}
    run = rig(tmp_path, lag, {"critic": critic}, algorithm=algorithm, rollout={"temperature": 0.7})
    run.run()
    assert [asked.step for asked in critic.asked] == [ValueStep(clip_value=0.07, temperature=0.7)] * 12
    assert critic.calls.count("optim_step") == 12
    of_policy = [asked for asked in run.learner.asked if asked.step.train_policy]
    assert len(of_policy) == 4 * 2
    assert {asked.step.value_coef for asked in of_policy} == {0.0}
    trained = {group for asked in of_policy for group in asked.batch.group_ids}
    warmed = {group for asked in critic.asked[:4] for group in asked.batch.group_ids}
    assert len(trained) == 16 and len(warmed) == 8 and not trained & warmed
    for asked in critic.asked:
        assert asked.batch.values is not None
        assert set(asked.batch.values[asked.batch.action_mask]) == {np.float32(0.25)}
    # The critic's update comes before the policy's, on the same rows.
    assert [asked.rows for asked in critic.asked[4:]] == [asked.rows for asked in of_policy]


def test_a_shared_critic_brings_its_loss_along_and_warms_up_alone(tmp_path: Path) -> None:
    settings = {"clip_value": 0.07, "warmup_steps": 2, "value_coef": 0.9}
    run = rig(tmp_path, algorithm={"name": "ppo", "num_epochs": 2, "critic": settings})
    run.learner.value = 0.5
    run.run()
    asked = run.learner.asked
    assert {(a.step.value_coef, a.step.clip_value) for a in asked} == {(0.9, 0.07)}
    assert [a.step.train_policy for a in asked] == [False] * 4 + [True] * 8
    assert {a.batch.values[-1] for a in asked if a.batch.values is not None} == {np.float32(0.5)}
    assert run.learner.calls[:5] == ["forward", *["forward_backward", "optim_step"] * 2]


@LAGS
def test_the_old_policy_is_the_one_before_the_first_update_of_the_step(tmp_path: Path, lag: int) -> None:
    run = rig(tmp_path, lag, algorithm={"name": "grpo", "num_epochs": 2, "num_mini_batches": 2})
    run.run()
    moved = 0
    for updates in by_step(run.learner.asked, 4):
        columns = [asked.batch.proximal_logprobs for asked in updates]
        assert columns[0] is not None
        assert all(np.array_equal(columns[0], column) for column in columns)
        behaviour = updates[0].batch.behaviour_logprobs
        moved += not np.allclose(columns[0], behaviour, atol=1e-6)
    # At lag 0 the engine's weights are the learner's of before the step; the first two steps of lag 1
    # train what version 0 drew.
    assert moved == (0 if lag == 0 else 5)


@LAGS
def test_the_learner_is_its_own_reference_only_where_the_plan_says_so(tmp_path: Path, lag: int) -> None:
    kl = {"coef": 0.1, "place": "loss"}
    own = rig(tmp_path, lag, {"learner_is_reference": True}, algorithm={"name": "grpo", "kl": kl})
    own.run()
    assert own.learner.calls.count("reference") == 6
    assert all(asked.batch.reference_logprobs is not None for asked in own.learner.asked)
    apart = rig(tmp_path / "apart", lag, algorithm={"name": "grpo", "kl": kl})
    apart.run()
    assert apart.learner.calls.count("reference") == 0
    for asked in apart.learner.asked:
        reference = asked.batch.reference_logprobs
        assert reference is not None
        assert np.allclose(reference[asked.batch.action_mask], np.log(0.5))


def test_versions_are_published_after_each_step_and_at_the_start(tmp_path: Path) -> None:
    run = rig(tmp_path)
    published: list[tuple[int, float]] = []
    publisher = run.loop._workers.publisher
    real = publisher.publish

    async def watched(version: int) -> Any:
        published.append((version, run.learner.weight))
        return await real(version)

    publisher.publish = watched  # type: ignore[method-assign]
    run.run()
    assert [version for version, _ in published] == [0, 1, 2, 3, 4, 5, 6]
    weights = [weight for _, weight in published]
    assert weights[0] == 0.0 and len(set(weights)) == 7
    for step in range(6):
        drawn = run.learner.asked[step].batch
        one = drawn.behaviour_logprobs[(drawn.tokens == 1) & drawn.action_mask]  # type: ignore[index]
        assert np.allclose(one, -np.log1p(np.exp(-weights[step]))), "drawn by the version before"
