"""Whole runs of the real local backend, computed again in plain PyTorch: the same final weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_cluster.config.reading.load import parse_config
from tests.wholerun.plain import Recomputed, recompute
from tests.wholerun.recorded import BASE, Recorded, merged, record_run, small_digits

TOLERANCE = 2e-6
"""Of any weight, after updates that move the weights by up to 0.03: float32 against float64."""

MANY = {"num_epochs": 2, "num_mini_batches": 2}
KL_IN_LOSS = {"coef": 0.3, "place": "loss", "estimator": "k3"}
TIGHT = {"clip_low": 0.02, "clip_high": 0.03}
LAG = {"async": {"max_policy_lag": 1, "importance_cap": 1.05}}


def loss(**settings: Any) -> dict[str, Any]:
    return {"loss": {**TIGHT, **settings}}


def grpo(**settings: Any) -> dict[str, Any]:
    return {"name": "grpo", **MANY, **loss(aggregation="sequence_mean"), **settings}


def rloo(**settings: Any) -> dict[str, Any]:
    kl = {"coef": 0.2, "place": "reward_sequence", "estimator": "k1"}
    return {
        "name": "rloo",
        **MANY,
        **loss(ratio="sequence", aggregation="sequence_mean"),
        "kl": kl,
    } | settings


def ppo(**settings: Any) -> dict[str, Any]:
    kl = {"coef": 0.2, "place": "reward_token", "estimator": "k1"}
    critic = {"value_coef": 0.4, "clip_value": 0.01}
    return {"name": "ppo", "gamma": 0.97, "lam": 0.9, **MANY, **loss(), "kl": kl, "critic": critic} | settings


def reinforce(**settings: Any) -> dict[str, Any]:
    kl = {"coef": 0.1, "place": "reward_token", "estimator": "k2"}
    return {"name": "reinforce", "gamma": 0.95, **MANY, **loss(), "kl": kl} | settings


SEPARATE = {"separate": True, "learning_rate": 2e-3, "clip_value": 0.01}
ADAPTIVE = {"controller": "adaptive", "target": 0.75, "horizon": 60}
GSPO = loss(ratio="sequence_mean", aggregation="sequence_mean", clip_low=0.003, clip_high=0.004)

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": grpo()},
    "grpo, one update": {"algorithm": grpo(num_epochs=1, num_mini_batches=1)},
    "grpo, KL in the loss": {"algorithm": grpo(kl=KL_IN_LOSS)},
    "grpo, other KL in the loss": {"algorithm": grpo(kl={**KL_IN_LOSS, "estimator": "k2"})},
    "grpo, adaptive KL in the loss": {"algorithm": grpo(kl={**KL_IN_LOSS, **ADAPTIVE})},
    "grpo, KL in the reward": {"algorithm": grpo(kl={**KL_IN_LOSS, "place": "reward_sequence"})},
    "grpo, entropy": {"algorithm": grpo(**loss(aggregation="sequence_mean", entropy_coef=0.2))},
    "grpo, scaled by the batch": {"algorithm": grpo(scale="batch")},
    "dr. grpo": {"algorithm": grpo(scale="none", **loss(aggregation="constant"))},
    "dapo": {"algorithm": grpo(**loss(aggregation="token_mean", clip_high=0.06))},
    "cispo": {"algorithm": grpo(**loss(kind="cispo", aggregation="token_mean"))},
    "cispo, bounds of its own": {
        "algorithm": grpo(loss={"kind": "cispo", "clip_high": 0.01, "aggregation": "sequence_mean"})
    },
    "sapo": {
        "algorithm": grpo(**loss(kind="sapo", temperature_positive=30.0, temperature_negative=50.0)),
    },
    "dapo, truncated samples left out": {
        "algorithm": grpo(**loss(aggregation="token_mean", mask_truncated=True)),
        "rollout": {"max_new_tokens": 4},
    },
    "gspo": {"algorithm": grpo(**GSPO)},
    "rloo": {"algorithm": rloo()},
    "rloo, normalised, adaptive KL": {
        "algorithm": rloo(
            normalize_advantage=True,
            kl={"coef": 0.2, "place": "reward_sequence", "estimator": "k1", **ADAPTIVE},
        )
    },
    "ppo, shared critic": {"algorithm": ppo()},
    "ppo, separate critic": {"algorithm": ppo(critic=SEPARATE)},
    "ppo, separate critic, adaptive KL": {
        "algorithm": ppo(
            critic=SEPARATE,
            kl={"coef": 0.2, "place": "reward_token", "estimator": "k3", **ADAPTIVE},
        ),
    },
    "reinforce++": {"algorithm": reinforce()},
    "reinforce++, baseline": {"algorithm": reinforce(baseline="group_mean", **loss(kind="reinforce"))},
    "grpo, lag 1": {"algorithm": grpo(), **LAG},
    "grpo, lag 1, one update": {"algorithm": grpo(num_epochs=1, num_mini_batches=1), **LAG},
    "grpo, lag 1, KL in the loss": {"algorithm": grpo(kl=KL_IN_LOSS), **LAG},
    "dr. grpo, lag 1": {"algorithm": grpo(scale="none", **loss(aggregation="constant")), **LAG},
    "dapo, lag 1": {"algorithm": grpo(**loss(aggregation="token_mean", clip_high=0.06)), **LAG},
    "gspo, lag 1": {"algorithm": grpo(**GSPO), **LAG},
    "rloo, lag 1": {"algorithm": rloo(), **LAG},
    "ppo, shared critic, lag 1": {"algorithm": ppo(), **LAG},
    "ppo, separate critic, lag 1": {"algorithm": ppo(critic=SEPARATE), **LAG},
    "reinforce++, lag 1": {"algorithm": reinforce(), **LAG},
}


@pytest.mark.parametrize("name", CASES)
def test_plain_pytorch_makes_the_same_final_weights(name: str, tmp_path: Path) -> None:
    run = record_run(tmp_path, CASES[name])
    assert_recomputed(run, recompute(run))
    assert_the_run_was_worth_computing(run)


@pytest.mark.parametrize("name", ["grpo, adaptive KL in the loss", "ppo, separate critic, adaptive KL"])
def test_a_resumed_run_goes_on_with_schedule_moments_and_coefficient(name: str, tmp_path: Path) -> None:
    """The plain computation knows nothing of the interruption."""
    run = record_run(tmp_path, CASES[name], stop_after=1)
    assert_recomputed(run, recompute(run))
    assert len(run.steps) == len(run.updates) == 3


def assert_recomputed(run: Recorded, plain: Recomputed) -> None:
    assert difference(run.final["policy"], plain.policy, {"lm.": "lm.", "value_head.": "head."}) < TOLERANCE
    if plain.critic is not None:
        names = {"trunk.": "trunk.", "value_head.": "head."}
        assert difference(run.final["critic"], plain.critic, names) < TOLERANCE
    used = [run.rows[step]["objective/kl_coef"] for step in sorted(run.rows) if step > 0]
    assert used == pytest.approx(plain.kl_coef[:-1], rel=1e-5)


def difference(final: dict[str, torch.Tensor], plain: torch.nn.Module, names: dict[str, str]) -> float:
    """The largest of any weight, all weights of both sides taken into account."""
    renamed = {}
    for name, tensor in final.items():
        if name.startswith("logprob_head."):
            continue  # the language model's own head under a second name
        prefix = next(p for p in names if name.startswith(p))
        own = names[prefix] + name.removeprefix(prefix)
        for ours, theirs in (("head.hidden", "head.0"), ("head.scalar", "head.2")):
            own = own.replace(ours, theirs) if own.startswith("head.") else own
        renamed[own] = tensor
    expected = dict(plain.named_parameters())
    assert renamed.keys() == expected.keys()
    return max(float((expected[n].detach() - tensor.double()).abs().max()) for n, tensor in renamed.items())


def assert_the_run_was_worth_computing(run: Recorded) -> None:
    """Rows of many lengths, weights that moved far beyond the tolerance, lag where there should be some."""
    assert len({len(sample.behaviour) for sample in run.steps[0]}) > 2
    for samples in run.steps:
        for sample in samples:
            assert sample.score == pytest.approx(small_digits([""], [sample.response], None)[0])
    lag = run.config.asynchrony.max_policy_lag
    seen = [step - int(s.versions.min()) for step, rows in enumerate(run.steps) for s in rows]
    assert max(seen) == lag
    algorithm = run.config.algorithm
    for updates in run.updates:
        assert len(updates) == algorithm.num_epochs * algorithm.num_mini_batches
        for epoch in range(algorithm.num_epochs):
            of_epoch = updates[epoch * algorithm.num_mini_batches :][: algorithm.num_mini_batches]
            assert sorted(row for rows in of_epoch for row in rows) == list(range(12))
    if algorithm.num_epochs > 1:
        orders = {tuple(updates[i] for i in (0, 1)) for updates in tupled(run.updates)}
        orders |= {tuple(updates[i] for i in (2, 3)) for updates in tupled(run.updates)}
        assert len(orders) == 2 * len(run.updates), "every epoch of every step has an order of its own"


def tupled(updates: list[list[list[int]]]) -> list[list[tuple[int, ...]]]:
    return [[tuple(rows) for rows in of_step] for of_step in updates]


def test_the_comparison_sees_a_small_change_of_any_setting(tmp_path: Path) -> None:
    """Each change is far above the tolerance, so none of these settings could be lost on the way."""
    changes = {"algorithm": grpo(kl={**KL_IN_LOSS, **ADAPTIVE}), **LAG}
    run = record_run(tmp_path, changes)
    exact = recompute(run).policy.state_dict()
    altered = [
        {"algorithm": {"kl": {"coef": 0.303}}},
        {"algorithm": {"kl": {"target": 0.76}}},
        {"algorithm": {"loss": {"clip_high": 0.06}}},
        {"async": {"importance_cap": 1.06}},
        {"rollout": {"temperature": 0.808}},
        {"optimizer": {"learning_rate": 5.05e-3}},
        {"optimizer": {"max_grad_norm": 0.101}},
        {"optimizer": {"weight_decay": 0.06}},
        {"optimizer": {"eps": 1.01e-4}},
        {"optimizer": {"schedule": "linear"}},
        {"optimizer": {"warmup_steps": 3}},
    ]
    for change in altered:
        config = parse_config(merged(merged(BASE, changes), change))
        other = recompute(Recorded(**{**vars(run), "config": config})).policy.state_dict()
        moved = max(float((other[name] - exact[name]).abs().max()) for name in exact)
        assert moved > 2 * TOLERANCE, change


def test_the_comparison_sees_other_rows_in_an_update(tmp_path: Path) -> None:
    run = record_run(tmp_path, {"algorithm": grpo()})
    swapped = [list(updates) for updates in run.updates]
    swapped[1][0], swapped[1][1] = swapped[1][1], swapped[1][0]
    other = recompute(Recorded(**{**vars(run), "updates": swapped}))
    assert difference(run.final["policy"], other.policy, {"lm.": "lm."}) > 10 * TOLERANCE
    assert np.isfinite(difference(run.final["policy"], other.policy, {"lm.": "lm."}))
