"""Every field of RLOOConfig acts, or is refused by name; batch arithmetic as in TRL's documentation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from rl_cluster.config import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trainers import without_effect
from rl_cluster.trainers.argument_checks import REFUSED, check_arguments
from rl_cluster.trainers.arguments import ACTS
from rl_cluster.trainers.rloo.config import RLOOConfig
from rl_cluster.trainers.rloo.run_config import (
    RLOO,
    Data,
    batches_of,
    check_rloo_config,
    fill_in,
    rloo_run_config,
)

DATA = Data(100, 20, 7, [{"kind": "callable", "name": "reward"}], eos_token_id=1)


def arguments(**options: Any) -> RLOOConfig:
    return RLOOConfig(**{"output_dir": "out", "report_to": "none", "use_cpu": True, **options})


def mapped(**options: Any) -> RunConfig:
    config = arguments(**options)
    check_rloo_config(config)
    return rloo_run_config(config, DATA, batches_of(config, DATA.num_train))


def test_every_field_is_in_exactly_one_table() -> None:
    names = [field.name for field in dataclasses.fields(TrainingArguments)]
    assert sorted([*ACTS, *REFUSED, *without_effect.TRAINING_ARGUMENTS]) == sorted(names)
    own = {field.name for field in dataclasses.fields(RLOOConfig)} - set(names)
    assert own == {*RLOO, "ds3_gather_for_generation"}
    assert "ds3_gather_for_generation" in without_effect.RLOO


def test_the_defaults_are_those_of_the_documentation() -> None:
    config = arguments()
    expected = {
        "exp_name": "rloo_config",
        "reward_model_path": "EleutherAI/pythia-160m",
        "sft_model_path": "EleutherAI/pythia-160m",
        "num_ppo_epochs": 4,
        "num_mini_batches": 1,
        "total_episodes": None,
        "local_rollout_forward_batch_size": 64,
        "num_sample_generations": 10,
        "response_length": 53,
        "stop_token": None,
        "stop_token_id": None,
        "temperature": 0.7,
        "missing_eos_penalty": None,
        "whiten_rewards": False,
        "kl_coef": 0.05,
        "cliprange": 0.2,
        "rloo_k": 2,
        "normalize_reward": False,
        "reward_clip_range": 10.0,
        "normalize_advantage": False,
        "token_level_kl": False,
        "ds3_gather_for_generation": True,
        "learning_rate": 5e-5,
        "per_device_train_batch_size": 8,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.0,
        "seed": 42,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_command_line_of_the_page_is_understood() -> None:
    line = (
        "--output_dir models/minimal/rloo_tldr --num_ppo_epochs 2 --num_mini_batches 2 --learning_rate 3e-6 "
        "--per_device_train_batch_size 16 --gradient_accumulation_steps 16 --total_episodes 1000000 "
        "--sft_model_path cleanrl/sft --reward_model_path cleanrl/reward "
        "--local_rollout_forward_batch_size 16 "
        "--missing_eos_penalty 1.0 --stop_token eos --kl_coef 0.03 --report_to none"
    )
    (config,) = HfArgumentParser(RLOOConfig).parse_args_into_dataclasses(line.split())
    batches = batches_of(config, num_prompts=100_000)
    assert (batches.batch_size, batches.mini_batch_size, batches.num_total_batches) == (512, 256, 1954)
    run = rloo_run_config(config, DATA, batches)
    assert (run.batch.prompts_per_step, run.batch.samples_per_prompt, run.run.steps) == (256, 2, 1954)
    assert (run.algorithm.num_epochs, run.algorithm.num_mini_batches) == (2, 2)
    assert run.rollout.stop_token_ids == (1,)


ACTING = [
    ({"output_dir": "here"}, "run.dir", "here"),
    ({"exp_name": "mine"}, "run.name", "mine"),
    ({"run_name": "other"}, "run.name", "other"),
    ({"seed": 7}, "run.seed", 7),
    ({"max_steps": 3}, "run.steps", 3),
    ({"num_train_epochs": 0.32}, "run.steps", 4),
    ({"total_episodes": 17}, "run.steps", 3),
    ({"learning_rate": 1e-3}, "optimizer.learning_rate", 1e-3),
    ({"weight_decay": 0.1}, "optimizer.weight_decay", 0.1),
    ({"adam_beta1": 0.8, "adam_beta2": 0.99}, "optimizer.betas", (0.8, 0.99)),
    ({"adam_epsilon": 1e-6}, "optimizer.eps", 1e-6),
    ({"max_grad_norm": 0.5}, "optimizer.max_grad_norm", 0.5),
    ({"max_grad_norm": 0.0}, "optimizer.max_grad_norm", 1e30),
    ({"lr_scheduler_type": "cosine"}, "optimizer.schedule", "cosine"),
    ({"lr_scheduler_type": "constant_with_warmup"}, "optimizer.schedule", "constant"),
    ({"warmup_steps": 2}, "optimizer.warmup_steps", 8),
    ({"warmup_ratio": 0.1, "max_steps": 10}, "optimizer.warmup_steps", 4),
    ({"warmup_steps": 0.1, "max_steps": 10}, "optimizer.warmup_steps", 4),
    ({"gradient_accumulation_steps": 3}, "batch.prompts_per_step", 12),
    ({"per_device_train_batch_size": 6}, "batch.prompts_per_step", 3),
    ({"per_device_train_batch_size": 6}, "batch.tokens_per_micro_batch", 360),
    ({"world_size": 2}, "batch.prompts_per_step", 8),
    ({"world_size": 2}, "learner.num_ranks", 2),
    ({"settings": {"learner.num_ranks": 2}}, "batch.prompts_per_step", 8),
    ({"settings": '{"sync.bucket_mib": 16}'}, "sync.bucket_mib", 16),
    ({"bf16": True}, "model.dtype", "bfloat16"),
    ({"gradient_checkpointing": True}, "model.gradient_checkpointing", True),
    ({"save_steps": 5}, "checkpoint.every", 5),
    ({"save_steps": 0.5, "max_steps": 10}, "checkpoint.every", 5),
    ({"save_strategy": "no"}, "checkpoint.every", 0),
    ({"save_strategy": "epoch"}, "checkpoint.every", 25),
    ({"save_total_limit": 3}, "checkpoint.keep_last", 3),
    ({"eval_strategy": "steps", "eval_steps": 6}, "eval.every", 6),
    ({"eval_strategy": "epoch"}, "eval.every", 25),
    ({}, "eval.every", 0),
    ({}, "eval.num_prompts", 20),
    ({"report_to": "tensorboard"}, "log.tensorboard", True),
    ({"report_to": "none"}, "log.tensorboard", False),
    ({"report_to": ["wandb"], "project": "p"}, "log.wandb_project", "p"),
    ({"disable_tqdm": True}, "log.progress", "none"),
    ({"progress": "plain", "disable_tqdm": False}, "log.progress", "plain"),
    ({"num_sample_generations": 5, "max_steps": 20}, "log.samples_every", 4),
    ({"num_sample_generations": 0}, "log.samples_every", 0),
    ({"use_cpu": True}, "cluster.device", "cpu"),
    ({"num_ppo_epochs": 2}, "algorithm.num_epochs", 2),
    ({"num_mini_batches": 2}, "algorithm.num_mini_batches", 2),
    ({"num_mini_batches": 2}, "batch.prompts_per_step", 8),
    ({"local_rollout_forward_batch_size": 5}, "rollout.max_concurrent_sequences", 5),
    ({"response_length": 9}, "rollout.max_new_tokens", 9),
    ({"stop_token": "eos"}, "rollout.stop_token_ids", (1,)),
    ({"stop_token_id": 5}, "rollout.stop_token_ids", (5,)),
    ({}, "rollout.stop_token_ids", ()),
    ({"temperature": 0.9}, "rollout.temperature", 0.9),
    ({"missing_eos_penalty": 2.0}, "rewards.shaping.missing_eos_penalty", 2.0),
    ({"whiten_rewards": True}, "algorithm.whiten_rewards", True),
    ({"normalize_advantage": True}, "algorithm.normalize_advantage", True),
    ({"kl_coef": 0.2}, "algorithm.kl.coef", 0.2),
    ({}, "algorithm.kl.place", "reward_sequence"),
    ({"token_level_kl": True}, "algorithm.kl.place", "reward_token"),
    ({"token_level_kl": True}, "algorithm.loss.ratio", "sequence"),
    ({"cliprange": 0.3}, "algorithm.loss.clip_low", 0.3),
    ({"cliprange": 0.3}, "algorithm.loss.clip_high", 0.3),
    ({"rloo_k": 4}, "batch.samples_per_prompt", 4),
    ({"rloo_k": 4}, "batch.prompts_per_step", 2),
    ({"normalize_reward": True}, "rewards.shaping.normalize", "batch"),
    ({"normalize_reward": True, "reward_clip_range": 3.0}, "rewards.shaping.clip", 3.0),
    ({"reward_clip_range": 3.0}, "rewards.shaping.clip", None),
    ({}, "rewards.max_failure_fraction", 0.0),
]


@pytest.mark.parametrize(("options", "name", "expected"), ACTING)
def test_fields_act(options: dict[str, Any], name: str, expected: Any) -> None:
    value: Any = mapped(**options)
    for part in name.split("."):
        value = getattr(value, part)
    assert value == expected


def test_every_own_field_and_every_argument_that_acts_has_a_case_above() -> None:
    shown = {name for options, _, _ in ACTING for name in options}
    elsewhere = {
        # The trainer's tests: which model, reward and backend; a folder deleted; what callbacks read.
        *("sft_model_path", "reward_model_path", "backend", "cluster", "overwrite_output_dir"),
        *("logging_strategy", "logging_steps", "logging_first_step"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        # Refused unless AdamW; derived; documented as without effect.
        *("optim", "ds3_gather_for_generation", "num_total_batches", "micro_batch_size", "local_batch_size"),
        *("batch_size", "local_mini_batch_size", "mini_batch_size"),
    }
    assert (ACTS | set(RLOO)) - shown - elsewhere == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rloo_k": 1}, "rloo_k=1: the baseline"),
        ({"rloo_k": 3}, r"rloo_k=3: does not divide the 8 completions of a batch"),
        ({"per_device_train_batch_size": 1}, r"rloo_k=2: does not divide the 1 completions"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0: must be a whole number"),
        ({"num_ppo_epochs": 0}, "RLOOConfig.num_ppo_epochs=0"),
        ({"response_length": 0}, "RLOOConfig.response_length=0"),
        ({"total_episodes": -1}, "RLOOConfig.total_episodes=-1"),
        ({"temperature": 0.0}, "RLOOConfig.temperature=0.0"),
        ({"cliprange": 1.5}, "RLOOConfig.cliprange=1.5"),
        ({"kl_coef": float("nan")}, "RLOOConfig.kl_coef=nan"),
        ({"missing_eos_penalty": -1.0}, "RLOOConfig.missing_eos_penalty=-1.0"),
        ({"stop_token": "bos"}, "RLOOConfig.stop_token='bos'"),
        ({"stop_token": "eos", "stop_token_id": 3}, "exclude each other"),
        ({"token_level_kl": "yes"}, "RLOOConfig.token_level_kl='yes'"),
        ({"backend": "slurm"}, "RLOOConfig.backend='slurm'"),
        ({"backend": "local", "cluster": "10.0.0.1:6379"}, r"RLOOConfig.cluster='10.0.0.1:6379': backend="),
        ({"settings": {"cluster.backend": "local"}, "cluster": "auto"}, r"RLOOConfig.cluster='auto'"),
        ({"total_episodes": 8, "max_steps": 2}, "total_episodes and max_steps are both given"),
        ({"eval_on_start": True}, "eval_on_start=True: needs an eval_strategy"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True: evaluations have the dtype of training"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True: has no meaning here"),
        ({"metric_for_best_model": "bleu"}, "metric_for_best_model='bleu': evaluations have loss, reward"),
        ({"warmup_ratio": 0.1, "warmup_steps": 2}, "give one"),
        ({"settings": "x"}, "settings='x': not JSON"),
        ({"settings": {"learner.ranks": 2}}, "learner.ranks"),
        ({"fp16": True}, "fp16=True: has no meaning here; use bf16"),
        ({"push_to_hub": True}, "push_to_hub=True: has no meaning here; push the exported folder"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial'"),
        ({"optim": "sgd"}, "optim='sgd'"),
        ({"report_to": "mlflow"}, "report_to='mlflow'"),
        ({"deepspeed": None, "data_seed": 3}, "data_seed=3"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        mapped(**options)


def test_every_refused_argument_is_refused_and_its_neutral_values_are_not(tmp_path: Path) -> None:
    config = arguments()
    check_arguments(config)
    for name, (neutral, _) in REFUSED.items():
        before = getattr(config, name)
        setattr(config, name, "something else")
        with pytest.raises(BadInputError, match=f"{name}='something else': has no meaning here"):
            check_arguments(config)
        for value in neutral:
            setattr(config, name, value)
            check_arguments(config)
        setattr(config, name, before)


def test_derived_sizes_are_filled_in_and_a_contradiction_is_refused() -> None:
    config = arguments(num_mini_batches=2, gradient_accumulation_steps=2, world_size=2, total_episodes=640)
    fill_in(config, batches_of(config, 100))
    sizes = (config.local_batch_size, config.micro_batch_size, config.batch_size)
    assert sizes == (32, 16, 64)
    assert (config.mini_batch_size, config.local_mini_batch_size, config.num_total_batches) == (32, 16, 10)
    config.total_episodes = 128
    fill_in(config, batches_of(config, 100))
    assert config.num_total_batches == 2, "what was filled in for one trainer does not bind the next"
    wrong = arguments(batch_size=5)
    with pytest.raises(BadInputError, match=r"RLOOConfig.batch_size=5: follows .* give 8"):
        fill_in(wrong, batches_of(wrong, 100))


def test_bf16_on_a_machine_without_a_gpu_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert RLOOConfig(output_dir="out", report_to="none", bf16=True).use_cpu
    assert not RLOOConfig(output_dir="out", report_to="none").use_cpu
