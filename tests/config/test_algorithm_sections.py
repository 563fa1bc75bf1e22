"""What the section `algorithm` and its neighbours mean where only a part of them is given."""

from __future__ import annotations

from typing import Any

import pytest

from rl_cluster.config.reading.load import apply_override, dump_config, parse_config
from rl_cluster.config.run import RunConfig, importance_cap

BASE: dict[str, Any] = {
    "model": {"scratch": {}},
    "data": {"train": {"source": "addition"}},
    "rewards": {"scorers": [{"kind": "exact_match"}]},
}


def build(*overrides: str) -> RunConfig:
    data = BASE
    for override in overrides:
        data = apply_override(data, override)
    return parse_config(data)


@pytest.mark.parametrize(
    ("overrides", "cap"),
    [
        ([], None),
        (["async.max_policy_lag=1"], 2.0),
        (["model.dtype=bfloat16"], 2.0),
        (["model.dtype=bfloat16", "async.max_policy_lag=2"], 2.0),
        (["async.importance_cap=1.5"], 1.5),
        (["async.importance_cap=3", "async.max_policy_lag=1"], 3.0),
        (["async.importance_cap=off", "model.dtype=bfloat16"], None),
        (["async.importance_cap=off", "async.max_policy_lag=1"], None),
        (["model.dtype=bfloat16", "rollout.top_k=5"], None),
    ],
)
def test_tokens_are_weighted_where_engine_and_learner_differ_or_where_it_is_asked_for(
    overrides: list[str], cap: float | None
) -> None:
    config = build(*overrides)
    assert importance_cap(config) == cap
    assert parse_config(apply_override(_plain(config), "run.seed=0")) == config


def _plain(config: RunConfig) -> dict[str, Any]:
    from rl_cluster.config.reading.yaml_text import parse_yaml

    return parse_yaml(dump_config(config), "dumped")


@pytest.mark.parametrize(
    ("name", "override", "kept"),
    [
        ("ppo", "algorithm.kl.coef=0.1", {"kl": {"coef": 0.1, "place": "reward_token", "estimator": "k1"}}),
        ("rloo", "algorithm.kl.coef=0.1", {"kl": {"place": "reward_sequence", "estimator": "k1"}}),
        ("reinforce", "algorithm.kl.coef=0.1", {"kl": {"place": "reward_token", "estimator": "k1"}}),
        (
            "rloo",
            "algorithm.loss.clip_high=0.3",
            {"loss": {"ratio": "sequence", "aggregation": "sequence_mean"}},
        ),
        (
            "grpo",
            "algorithm.loss.clip_high=0.3",
            {"loss": {"clip_high": 0.3, "aggregation": "sequence_mean"}},
        ),
        ("grpo", "algorithm.loss.aggregation=constant", {"loss": {"aggregation": "constant"}}),
    ],
)
def test_a_section_given_in_part_keeps_the_algorithms_own_defaults(
    name: str, override: str, kept: dict[str, dict[str, Any]]
) -> None:
    algorithm = build(f"algorithm.name={name}", override).algorithm.model_dump()
    for section, values in kept.items():
        assert {key: algorithm[section][key] for key in values} == values


def test_cispo_bounds_the_weights_at_5_and_not_from_below() -> None:
    loss = build("algorithm.name=grpo", "algorithm.loss.kind=cispo").algorithm.loss
    assert (loss.clip_low, loss.clip_high) == (1.0, 4.0)
    assert (
        build("algorithm.name=grpo", "algorithm.loss={kind: cispo, clip_high: 3}").algorithm.loss.clip_high
        == 3.0
    )
    assert build("algorithm.name=grpo", "algorithm.loss.kind=sapo").algorithm.loss.clip_high == 0.2
