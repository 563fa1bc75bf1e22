"""The public API of the documents, under its own names: what is imported, its fields and their defaults.

What each part does is in tests/original_api; everything there, too, is imported from rl_cluster alone.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

import rl_cluster

NAMES = [
    *("PPOConfig", "PPOTrainer", "PPOModel", "ValueHead", "AdaptiveKLController", "PPOBuffer"),
    *("DPOConfig", "DPOTrainer", "PreferenceDataset", "ORPOConfig", "ORPOTrainer"),
    *("ForwardBackwardPipeline", "AsyncTrainingFuture", "ForwardBackwardOutput", "OptimStepOutput"),
    "AsyncTrainingClient",
    *("RewardModelConfig", "RewardModel", "PairwiseRewardModel", "MultiObjectiveRewardModel"),
    "RewardModelTrainer",
    *("Observation", "StepResult", "Trajectory", "RLEnvironment", "TextGenerationEnv"),
    *("MultiObjectiveRewardEnv", "PreferenceComparisonEnv"),
    *("create_math_problem_env", "create_code_generation_env", "create_rl_environment"),
    "create_env_aware_reward_fn",
    *("CustomLossConfig", "CustomLoss", "CompositeLoss", "AdaptiveLoss", "TokenLevelLoss", "FocalLoss"),
    *("KLDivergenceLoss", "PPOLoss", "ImportanceSamplingLoss", "ContrastiveLoss", "VarianceLoss"),
    *("compute_ppo_loss", "compute_kl_penalty", "variance_regularization"),
    *("RLOOConfig", "RLOOTrainer", "GRPOConfig", "GRPOTrainer"),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_documented_name_is_imported_from_the_package(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"from rl_cluster import {name}", scope)
    assert scope[name].__name__ == name
    assert name in rl_cluster.__all__
    assert name in dir(rl_cluster)


DEFAULTS: dict[str, dict[str, Any]] = {
    "PPOConfig": {
        "learning_rate": 1e-5,
        "batch_size": 16,
        "mini_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "ppo_epochs": 4,
        "gamma": 0.99,
        "lam": 0.95,
        "clip_ratio": 0.2,
        "clip_param": 0.2,
        "value_clip": 0.2,
        "max_grad_norm": 1.0,
        "kl_penalty_coef": 0.01,
        "kl_target": 0.01,
        "kl_horizon": 10000,
        "entropy_coef": 0.01,
        "value_coef": 0.5,
        "max_new_tokens": 128,
        "temperature": 0.7,
        "top_p": 0.9,
        "num_iterations": 100,
        "save_every": 10,
        "eval_every": 5,
        "device": None,
        "init_kl_coef": 0.2,
        "target": 6,
        "horizon": 10000,
    },
    "DPOConfig": {
        "learning_rate": 1e-6,
        "batch_size": 8,
        "gradient_accumulation_steps": 2,
        "beta": 0.1,
        "label_smoothing": 0.0,
        "reference_free": False,
        "num_epochs": 1,
        "max_grad_norm": 1.0,
        "warmup_ratio": 0.1,
        "max_length": 512,
        "max_prompt_length": 256,
        "eval_every": 100,
        "save_every": 500,
        "device": None,
    },
    "RewardModelConfig": {
        "num_labels": 1,
        "pooling_strategy": "last",
        "dropout_prob": 0.1,
        "temperature": 1.0,
        "use_lora": False,
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "learning_rate": 1e-4,
        "warmup_steps": 100,
        "gradient_accumulation_steps": 1,
    },
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_configuration_has_the_documented_defaults(name: str) -> None:
    config = getattr(rl_cluster, name)(model_name="owner/model")
    assert config.model_name == "owner/model"
    assert {field: getattr(config, field) for field in DEFAULTS[name]} == DEFAULTS[name]


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_configuration_takes_every_documented_field_by_name(name: str) -> None:
    given = DEFAULTS[name] | {"model_name": "owner/model", "learning_rate": 3e-4}
    config = getattr(rl_cluster, name)(**given)
    assert {field: getattr(config, field) for field in given} == given


def test_a_loss_configuration_has_the_documented_fields() -> None:
    config = rl_cluster.CustomLossConfig(name="mine")
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert fields.pop("name") == "mine"
    assert fields.pop("epsilon") == 1e-8
    assert fields == {
        "weight": 1.0,
        "reduction": "mean",
        "normalize": False,
        "clip_value": None,
        "temperature": 1.0,
    }


SIGNATURES = {
    "PreferenceDataset": "prompts chosen rejected tokenizer max_length=512 max_prompt_length=256",
    "ForwardBackwardPipeline": "model device=None max_workers=2 gradient_accumulation_steps=1",
    "ForwardBackwardPipeline.forward_backward_custom": "input_ids custom_loss_fn attention_mask=None",
    "ForwardBackwardPipeline.optim_step": "optimizer=None scheduler=None max_grad_norm=1.0",
    "ForwardBackwardPipeline.sample": "prompt max_tokens=100 temperature=1.0 top_k=-1 top_p=1.0 stop=None",
    "AdaptiveKLController": "init_kl_coef target horizon",
    "AdaptiveKLController.update": "current n_steps",
    "PPOTrainer.compute_kl_penalty": "logprobs ref_logprobs",
    "PPOTrainer.generate_responses": "prompts max_new_tokens=None",
    "PPOTrainer.train": "prompts num_iterations=None",
    "RewardModel": "config base_model=None",
    "RewardModel.predict_rewards": "texts tokenizer max_length=512 batch_size=8",
    "MultiObjectiveRewardModel": "config num_objectives=3 objective_weights=None",
    "MultiObjectiveRewardModel.combine_objectives": "rewards",
    "RewardModelTrainer": "model tokenizer config device=None",
    "RewardModelTrainer.train_on_preferences": "chosen_texts rejected_texts num_epochs=3 batch_size=8",
    "TextGenerationEnv": (
        "tokenizer prompts max_length=512 reward_fn=None stop_sequences=None temperature=1.0"
    ),
    "MultiObjectiveRewardEnv": "tokenizer prompts reward_components reward_weights=None",
    "create_rl_environment": "config tokenizer prompts",
    "create_env_aware_reward_fn": "env reward_model tokenizer",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_come_in_the_documented_order_with_the_documented_defaults(name: str) -> None:
    owner, _, method = name.partition(".")
    thing = getattr(getattr(rl_cluster, owner), method) if method else getattr(rl_cluster, owner)
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
    words = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    documented = SIGNATURES[name].split()
    assert words[: len(documented)] == documented
    ours = list(zip(words, parameters, strict=True))[len(documented) :]
    assert all("=" in word or p.kind is not p.POSITIONAL_OR_KEYWORD for word, p in ours), "optional"


def test_the_dataclasses_of_the_environments_have_the_documented_fields() -> None:
    fields = {
        name: [field.name for field in dataclasses.fields(getattr(rl_cluster, name))]
        for name in ("Observation", "StepResult", "Trajectory")
    }
    assert fields == {
        "Observation": ["input_ids", "attention_mask", "prompt", "metadata"],
        "StepResult": ["reward", "done", "next_observation", "info", "metrics"],
        "Trajectory": ["observations", "actions", "rewards", "logprobs", "done", "total_reward", "metrics"],
    }


def test_the_trajectory_of_the_package_is_that_of_the_environments() -> None:
    ids = torch.tensor([[1, 2]])
    seen = rl_cluster.Observation(ids, torch.ones_like(ids), "prompt", {"step": 0})
    trajectory = rl_cluster.Trajectory(
        observations=[seen],
        actions=[torch.tensor([3])],
        rewards=[0.5],
        logprobs=[torch.tensor([-0.1])],
        done=True,
        total_reward=0.5,
        metrics={"length": 1},
    )
    assert trajectory.total_reward == sum(trajectory.rewards)
    assert trajectory.observations[0].metadata == {"step": 0}
    assert rl_cluster.Trajectory is rl_cluster.environments.Trajectory
