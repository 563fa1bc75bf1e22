"""Every field of GRPOConfig acts, is refused by name, or is documented as without effect."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from rl_cluster.config import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trainers import without_effect
from rl_cluster.trainers.arguments import ACTS
from rl_cluster.trainers.grpo.config import GRPOConfig
from rl_cluster.trainers.grpo.run_config import (
    GRPO,
    OWN_REFUSED,
    Data,
    check_grpo_config,
    counts_of,
    generation_of,
    grpo_run_config,
)

DATA = Data(100, 20, 7, [{"kind": "callable", "name": "reward"}])


def mapped(**options: Any) -> RunConfig:
    config = GRPOConfig(**{"output_dir": "out", "report_to": "none", "use_cpu": True, **options})
    check_grpo_config(config)
    generation = generation_of(config)
    return grpo_run_config(config, DATA, generation, counts_of(config, DATA.num_train, generation))


def test_every_field_is_in_exactly_one_table() -> None:
    own = {f.name for f in dataclasses.fields(GRPOConfig)} - {
        f.name for f in dataclasses.fields(TrainingArguments)
    }
    never = {"ds3_gather_for_generation"}
    assert never < set(without_effect.GRPO)
    assert sorted([*GRPO, *OWN_REFUSED, *never]) == sorted(own)


ACTING = [
    ({}, "batch.samples_per_prompt", 8),
    ({}, "batch.prompts_per_step", 1),
    ({}, "optimizer.learning_rate", 1e-6),
    ({}, "algorithm.kl.coef", 0.0),
    ({}, "algorithm.loss.aggregation", "token_mean"),
    ({}, "rollout.top_k", -1),
    ({}, "model.disable_dropout", False),
    ({"disable_dropout": True}, "model.disable_dropout", True),
    ({"num_generations": 4}, "batch.samples_per_prompt", 4),
    ({"num_generations": 4}, "batch.prompts_per_step", 2),
    ({"num_generations": 4}, "run.steps", 150),
    ({"num_generations_eval": 3}, "eval.samples_per_prompt", 3),
    ({}, "eval.samples_per_prompt", 8),
    ({"max_completion_length": 9}, "rollout.max_new_tokens", 9),
    ({"max_completion_length": 9}, "batch.tokens_per_micro_batch", 8 * 16),
    ({"steps_per_generation": 4}, "batch.prompts_per_step", 4),
    ({"steps_per_generation": 4}, "algorithm.num_mini_batches", 4),
    ({"generation_batch_size": 32}, "batch.prompts_per_step", 4),
    ({"generation_batch_size": 32}, "algorithm.num_mini_batches", 4),
    ({"gradient_accumulation_steps": 4}, "batch.prompts_per_step", 4),
    ({"gradient_accumulation_steps": 4}, "algorithm.num_mini_batches", 1),
    ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, "batch.prompts_per_step", 4),
    ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, "algorithm.num_mini_batches", 2),
    ({"num_iterations": 3}, "algorithm.num_epochs", 3),
    ({"num_iterations": 3, "max_steps": 12}, "run.steps", 4),
    ({"num_iterations": 3, "max_steps": 12}, "run.max_updates", None),
    ({"num_iterations": 2, "max_steps": 3}, "run.steps", 2),
    ({"num_iterations": 2, "max_steps": 3}, "run.max_updates", 3),
    ({"num_iterations": 2, "max_steps": 3, "warmup_ratio": 0.4}, "optimizer.warmup_steps", 2),
    ({"num_iterations": 3, "save_steps": 7}, "checkpoint.every", 3),
    ({"settings": {"learner.num_ranks": 2}}, "batch.prompts_per_step", 2),
    ({"shuffle_dataset": False}, "data.shuffle", False),
    ({"model_init_kwargs": '{"trust_remote_code": true}'}, "model.trust_remote_code", True),
    ({"model_init_kwargs": {"dtype": "bfloat16"}}, "model.dtype", "bfloat16"),
    ({"temperature": 0.7}, "rollout.temperature", 0.7),
    ({"temperature": 0.7}, "eval.temperature", 0.7),
    ({"generation_kwargs": {"stop": "\n"}}, "rollout.stop", ("\n",)),
    ({"generation_kwargs": {"stop_token_ids": [3]}}, "rollout.stop_token_ids", (3,)),
    ({"beta": 0.1}, "algorithm.kl.coef", 0.1),
    ({"beta": 0.1}, "algorithm.kl.place", "loss"),
    ({"beta": 0.1}, "algorithm.kl.estimator", "k3"),
    ({"epsilon": 0.1}, "algorithm.loss.clip_low", 0.1),
    ({"epsilon": 0.1}, "algorithm.loss.clip_high", 0.1),
    ({"epsilon_high": 0.28}, "algorithm.loss.clip_low", 0.2),
    ({"epsilon_high": 0.28}, "algorithm.loss.clip_high", 0.28),
    ({"loss_type": "grpo"}, "algorithm.loss.aggregation", "sequence_mean"),
    ({"loss_type": "bnpo"}, "algorithm.loss.aggregation", "token_mean"),
    ({"loss_type": "dr_grpo"}, "algorithm.loss.aggregation", "constant"),
    ({"loss_type": "dapo"}, "algorithm.loss.kind", "clip"),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "algorithm.loss.kind", "cispo"),
    ({"loss_type": "cispo"}, "algorithm.loss.clip_low", 1.0),
    ({"loss_type": "cispo"}, "algorithm.loss.clip_high", 4.0),
    ({"loss_type": "cispo", "epsilon_high": 4.0, "epsilon": 0.1}, "algorithm.loss.clip_high", 3.0),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "algorithm.loss.clip_low", 1.0),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "algorithm.loss.clip_high", 4.0),
    ({"loss_type": "sapo"}, "algorithm.loss.kind", "sapo"),
    ({"loss_type": "sapo"}, "algorithm.loss.aggregation", "sequence_mean"),
    ({"sapo_temperature_neg": 2.0}, "algorithm.loss.temperature_negative", 2.0),
    ({"sapo_temperature_pos": 2.0}, "algorithm.loss.temperature_positive", 2.0),
    ({"importance_sampling_level": "sequence"}, "algorithm.loss.ratio", "sequence_mean"),
    ({"scale_rewards": "batch"}, "algorithm.scale", "batch"),
    ({"scale_rewards": True}, "algorithm.scale", "group"),
    ({"scale_rewards": False}, "algorithm.scale", "none"),
    ({"mask_truncated_completions": True}, "algorithm.loss.mask_truncated", True),
    ({"log_completions": True, "logging_steps": 4}, "log.samples_every", 4),
    ({}, "log.samples_every", 0),
    ({"num_completions_to_print": 2}, "log.num_samples", 2),
    ({"vllm_gpu_memory_utilization": 0.3}, "rollout.gpu_memory_fraction", 0.3),
    ({"vllm_tensor_parallel_size": 2}, "rollout.tensor_parallel_size", 2),
    ({"warmup_ratio": 0.1, "max_steps": 100}, "optimizer.warmup_steps", 10),
    ({"warmup_steps": 5}, "optimizer.warmup_steps", 5),
    ({"warmup_steps": 0.1, "max_steps": 100}, "optimizer.warmup_steps", 10),
    ({"progress": "plain", "disable_tqdm": False}, "log.progress", "plain"),
]


@pytest.mark.parametrize(("options", "name", "expected"), ACTING)
def test_fields_act(options: dict[str, Any], name: str, expected: Any) -> None:
    value: Any = mapped(**options)
    for part in name.split("."):
        value = getattr(value, part)
    assert value == expected


def test_every_own_field_has_a_case_above_or_in_the_trainers_tests() -> None:
    shown = {name for options, _, _ in ACTING for name in options} | ACTS
    elsewhere = {"max_prompt_length", "reward_weights", "overwrite_output_dir", "backend", "cluster"}
    elsewhere |= {"use_vllm"}
    assert set(GRPO) - shown - elsewhere == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 1}, "num_generations=1: completions are compared"),
        ({"num_generations": 3}, "num_generations=3: does not divide the 8 completions"),
        ({"generation_batch_size": 9}, "generation_batch_size=9: is not a multiple"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "give one of them"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "updates would straddle generations"),
        ({"loss_type": "luspo"}, "loss_type='luspo': must be one of grpo, bnpo, dr_grpo, dapo, cispo, sapo"),
        ({"loss_type": "cispo", "epsilon_high": 0.9}, "epsilon_high=0.9: with loss_type='cispo'"),
        ({"importance_sampling_level": "sentence"}, "must be one of token, sequence"),
        ({"scale_rewards": "std"}, "scale_rewards='std'"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"epsilon": 2.0}, "epsilon=2.0: must be at most 1"),
        ({"epsilon_high": 0.0}, "epsilon_high=0.0"),
        ({"top_p": 0.9}, "top_p=0.9: not here; the importance ratios"),
        ({"top_k": 50}, "top_k=50: not here"),
        ({"delta": 1.5}, "delta=1.5: not here"),
        ({"sync_ref_model": True}, "sync_ref_model=True: not here"),
        ({"num_iterations": 0}, "num_iterations=0"),
        ({"max_prompt_length": 0}, "max_prompt_length=0"),
        ({"generation_kwargs": {"do_sample": False}}, "may hold stop, stop_token_ids"),
        ({"model_init_kwargs": "{"}, "model_init_kwargs"),
        ({"num_train_epochs": 0.0}, "num_train_epochs=0.0"),
        ({"backend": "k8s"}, "GRPOConfig.backend='k8s'"),
        ({"backend": "local", "cluster": "10.0.0.1:6379"}, r"GRPOConfig.cluster='10.0.0.1:6379': backend="),
        ({"settings": {"cluster.backend": "local"}, "cluster": "auto"}, r"GRPOConfig.cluster='auto'"),
        ({"backend": "local", "use_vllm": True}, "use_vllm=True"),
        ({"settings": {"cluster.backend": "local"}, "use_vllm": True}, "use_vllm=True"),
        ({"ref_model_sync_steps": 64}, "ref_model_sync_steps=64: not here; it belongs to sync_ref_model"),
        ({"ref_model_mixup_alpha": 0.5}, "ref_model_mixup_alpha=0.5: not here"),
        ({"warmup_ratio": 0.1, "warmup_steps": 2}, "give one"),
        ({"model_init_kwargs": {"dtype": "float16"}}, "dtype='float16': must be float32 or bfloat16"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        mapped(**options)


def test_a_command_line_is_understood() -> None:
    line = "--output_dir out --report_to none --num_generations 4 --loss_type sapo --reward_weights 1 0.5"
    (config,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(line.split())
    assert (config.num_generations, config.loss_type, config.reward_weights) == (4, "sapo", [1.0, 0.5])
