"""From a configuration in which nothing is a default to what the learners are told, field by field."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from learners.spec import LearnerSpec
from rl_cluster.assembly.learner import critic_spec, policy_spec
from rl_cluster.config.planning.machine import Machine
from rl_cluster.config.planning.plan import make_plan
from rl_cluster.config.reading.load import parse_config
from rl_cluster.config.run import LoRAConfig, OptimizerConfig

OPTIMIZER = {
    "learning_rate": 3e-4,
    "betas": [0.7, 0.9],
    "eps": 1e-6,
    "weight_decay": 0.03,
    "max_grad_norm": 0.4,
    "schedule": "linear",
    "warmup_steps": 3,
}
VALUES: dict[str, Any] = {
    "run": {"steps": 7, "seed": 11},
    "model": {
        "path": "policy",
        "dtype": "bfloat16",
        "disable_dropout": True,
        "gradient_checkpointing": True,
        "trust_remote_code": True,
    },
    "data": {"train": {"source": "addition"}},
    "rewards": {"scorers": [{"kind": "exact_match"}]},
    "batch": {"prompts_per_step": 6, "samples_per_prompt": 4, "tokens_per_micro_batch": 333},
    "rollout": {"temperature": 0.6, "max_new_tokens": 17},
    "optimizer": OPTIMIZER,
    "learner": {"zero_stage": 2, "offload_optimizer": True, "deadline_seconds": 44.0},
    "cluster": {"start_deadline_seconds": 55.0, "device": "cpu", "cpus_per_worker": 1},
}
PPO = {"name": "ppo", "num_epochs": 3, "num_mini_batches": 2}
MACHINE = Machine(cores=2, memory=16 * 2**30, gpus=0, gpu_memory=0)

EXPECTED = LearnerSpec(
    model_path="folder",
    temperature=0.6,
    max_new_tokens=17,
    tokens_per_micro_batch=333,
    total_steps=7 * 3 * 2,
    optimizer=OptimizerConfig(**{**OPTIMIZER, "betas": (0.7, 0.9)}),  # type: ignore[arg-type]
    dtype="bfloat16",
    kind="policy_with_values",
    disable_dropout=True,
    gradient_checkpointing=True,
    trust_remote_code=True,
    engine="deepspeed",
    zero_stage=2,
    offload_optimizer=True,
    device="cpu",
    num_threads=1,
    seed=11,
    deadline_seconds=44.0,
    start_deadline_seconds=55.0,
)


def spec_with(**sections: Any) -> tuple[Any, Any]:
    values = {**VALUES, **{name: {**VALUES.get(name, {}), **section} for name, section in sections.items()}}
    config = parse_config(values)
    return config, make_plan(config, MACHINE)


def test_a_policy_with_a_shared_critic_is_told_everything() -> None:
    assert policy_spec(*spec_with(algorithm=PPO), "folder") == EXPECTED


def test_no_field_of_the_expectation_is_a_default_that_could_hide_a_loss() -> None:
    plain = LearnerSpec("unlike")
    same = {f.name for f in fields(LearnerSpec) if getattr(plain, f.name) == getattr(EXPECTED, f.name)}
    assert same == {"lora", "engine", "device", "persist_below", "pad_token_id", "reference_path"}


def test_a_separate_critic_has_a_rate_and_a_model_of_its_own() -> None:
    critic = {"separate": True, "learning_rate": 0.25, "model": "values"}
    config, plan = spec_with(algorithm={**PPO, "critic": critic})
    own = EXPECTED.optimizer.model_copy(update={"learning_rate": 0.25})
    expected = replace(EXPECTED, kind="critic", optimizer=own, model_path="values")
    assert critic_spec(config, plan, "folder") == expected
    assert policy_spec(config, plan, "folder") == replace(EXPECTED, kind="policy")


def test_a_separate_critic_takes_the_policys_rate_and_model_unless_told_otherwise() -> None:
    config, plan = spec_with(algorithm={**PPO, "critic": {"separate": True}})
    assert critic_spec(config, plan, "folder") == replace(EXPECTED, kind="critic")


def test_while_a_separate_critic_warms_up_the_policys_schedule_has_not_begun() -> None:
    config, plan = spec_with(algorithm={**PPO, "critic": {"separate": True, "warmup_steps": 3}})
    assert policy_spec(config, plan, "folder").total_steps == (7 - 3) * 6
    assert critic_spec(config, plan, "folder").total_steps == 7 * 6
    config, plan = spec_with(algorithm={**PPO, "critic": {"warmup_steps": 3}})
    assert policy_spec(config, plan, "folder").total_steps == 7 * 6


def test_adapters_are_the_policys_alone() -> None:
    lora = {"rank": 3, "alpha": 5.0, "dropout": 0.1, "targets": ["q_proj"]}
    config, plan = spec_with(algorithm={**PPO, "critic": {"separate": True}}, model={"lora": lora})
    adapters = LoRAConfig(rank=3, alpha=5.0, dropout=0.1, targets=("q_proj",))
    assert policy_spec(config, plan, "folder") == replace(EXPECTED, kind="policy", lora=adapters)
    assert critic_spec(config, plan, "folder").lora is None


@pytest.mark.parametrize("other", [None, "elsewhere"])
def test_the_exact_divergence_puts_the_reference_beside_the_policy(other: str | None) -> None:
    kl = {"coef": 0.1, "place": "reward_token", "estimator": "exact"}
    config, plan = spec_with(algorithm={"name": "grpo", "kl": kl}, model={"reference_path": other})
    expected = replace(EXPECTED, kind="policy", total_steps=7, reference_path=other or "folder")
    assert policy_spec(config, plan, "folder") == expected


def test_the_local_backend_is_plain_adamw_with_the_same_numbers() -> None:
    config, plan = spec_with(algorithm=PPO, cluster={"backend": "local"})
    assert policy_spec(config, plan, "folder") == replace(EXPECTED, engine="torch")
