"""Another value for every field of every front's configuration, and what a front makes of a configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForSequenceClassification

import rl_cluster
from rl_cluster.trainers.callbacks import CallbackHooks
from tests.trainers.tiny import tiny_model

ROWS = [{"prompt": f"{a}{b}="} for a in range(4) for b in range(4)]

TRAINING_ARGUMENTS: dict[str, Any] = {
    "output_dir": "elsewhere",
    "per_device_train_batch_size": 32,
    "num_train_epochs": 2.0,
    "max_steps": 7,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "warmup_steps": 1,
    "optim": "sgd",
    "optim_args": "a=1",
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-6,
    "optim_target_modules": ["q_proj"],
    "gradient_accumulation_steps": 2,
    "average_tokens_across_devices": False,
    "max_grad_norm": 0.5,
    "label_smoothing_factor": 0.1,
    "bf16": True,
    "fp16": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "tf32": True,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "torch_compile": True,
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "use_cache": True,
    "neftune_noise_alpha": 0.1,
    "torch_empty_cache_steps": 3,
    "auto_find_batch_size": True,
    "logging_strategy": "no",
    "logging_steps": 2,
    "logging_first_step": True,
    "log_on_each_node": False,
    "logging_nan_inf_filter": False,
    "include_num_input_tokens_seen": "all",
    "log_level": "debug",
    "log_level_replica": "debug",
    "disable_tqdm": True,
    "report_to": "tensorboard",
    "run_name": "mine",
    "project": "mine",
    "trackio_space_id": "a",
    "trackio_bucket_id": "a",
    "trackio_static_space_id": "a",
    "eval_strategy": "steps",
    "eval_steps": 3,
    "eval_delay": 2,
    "per_device_eval_batch_size": 3,
    "prediction_loss_only": True,
    "eval_on_start": True,
    "eval_do_concat_batches": False,
    "eval_use_gather_object": True,
    "eval_accumulation_steps": 2,
    "include_for_metrics": ["loss"],
    "batch_eval_metrics": True,
    "save_only_model": True,
    "save_strategy": "no",
    "save_steps": 3,
    "save_on_each_node": True,
    "save_total_limit": 3,
    "enable_jit_checkpoint": True,
    "push_to_hub": True,
    "hub_token": "a",
    "hub_private_repo": True,
    "hub_model_id": "a/b",
    "hub_strategy": "end",
    "hub_always_push": True,
    "hub_revision": "a",
    "load_best_model_at_end": True,
    "metric_for_best_model": "mean_length",
    "greater_is_better": False,
    "ignore_data_skip": True,
    "restore_callback_states_from_checkpoint": True,
    "full_determinism": True,
    "seed": 3,
    "data_seed": 3,
    "use_cpu": False,
    "accelerator_config": {"even_batches": False},
    "parallelism_config": "a",
    "dataloader_drop_last": True,
    "dataloader_num_workers": 2,
    "dataloader_pin_memory": False,
    "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 2,
    "dataloader_multiprocessing_context": "spawn",
    "dataloader_in_order": False,
    "remove_unused_columns": False,
    "label_names": ["a"],
    "train_sampling_strategy": "sequential",
    "length_column_name": "a",
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 3,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "ddp_backend": "gloo",
    "ddp_timeout": 3,
    "fsdp": "full_shard",
    "fsdp_config": {"min_num_params": 3},
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "debug": "underflow_overflow",
    "skip_memory_metrics": False,
    "do_train": True,
    "do_eval": True,
    "do_predict": True,
    "resume_from_checkpoint": "somewhere",
    "local_rank": 1,
}
BESIDE: dict[str, dict[str, Any]] = {
    "eval_steps": {"eval_strategy": "steps"},
    "eval_on_start": {"eval_strategy": "steps"},
    "bf16_full_eval": {"bf16": True},
    "load_best_model_at_end": {"eval_strategy": "steps", "eval_steps": 500},
    "metric_for_best_model": {"metric_for_best_model": "reward"},
    "greater_is_better": {"metric_for_best_model": "reward"},
    "project": {"report_to": "wandb"},
}
"""Settings that a field acts beside."""
COMMON = {
    "warmup_ratio": 0.3,
    "overwrite_output_dir": True,
    "backend": "ray",
    "cluster": "10.0.0.1:6379",
    "progress": "plain",
    "settings": {"sync.bucket_mib": 16},
}
RLOO: dict[str, Any] = {
    "exp_name": "mine",
    "num_ppo_epochs": 2,
    "num_mini_batches": 2,
    "total_episodes": 64,
    "local_rollout_forward_batch_size": 5,
    "num_sample_generations": 0,
    "response_length": 3,
    "stop_token": "eos",
    "stop_token_id": 5,
    "temperature": 0.9,
    "missing_eos_penalty": 1.0,
    "whiten_rewards": True,
    "kl_coef": 0.2,
    "cliprange": 0.3,
    "rloo_k": 4,
    "normalize_reward": True,
    "reward_clip_range": 3.0,
    "normalize_advantage": True,
    "token_level_kl": True,
    "ds3_gather_for_generation": False,
    "world_size": 2,
    **dict.fromkeys(("num_total_batches", "micro_batch_size", "local_batch_size", "batch_size"), 5),
    **dict.fromkeys(("local_mini_batch_size", "mini_batch_size"), 5),
    **COMMON,
}
GRPO: dict[str, Any] = {
    "num_generations": 2,
    "num_generations_eval": 3,
    "max_prompt_length": 2,
    "max_completion_length": 3,
    "generation_batch_size": 32,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "shuffle_dataset": False,
    "model_init_kwargs": {"trust_remote_code": True},
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "generation_kwargs": {"stop": "\n"},
    "beta": 0.1,
    "epsilon": 0.1,
    "epsilon_high": 0.3,
    "delta": 1.5,
    "loss_type": "grpo",
    "sapo_temperature_neg": 2.0,
    "sapo_temperature_pos": 2.0,
    "importance_sampling_level": "sequence",
    "scale_rewards": "batch",
    "reward_weights": [0.5],
    "mask_truncated_completions": True,
    "top_entropy_quantile": 0.5,
    "multi_objective_aggregation": "normalize_then_sum",
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 0.3,
    "ref_model_sync_steps": 3,
    "log_completions": True,
    "num_completions_to_print": 2,
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 2,
    "ds3_gather_for_generation": False,
    "disable_dropout": True,
    **COMMON,
}
FIT: dict[str, Any] = {
    "learning_rate": 1e-3,
    "batch_size": 3,
    "gradient_accumulation_steps": 3,
    "num_epochs": 3,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
    "warmup_ratio": 0.3,
    "lr_scheduler_type": "cosine",
    "max_length": 700,
    "max_prompt_length": 100,
    "eval_every": 3,
    "save_every": 3,
    "device": "cpu",
    "seed": 3,
    "bf16": True,
    "gradient_checkpointing": True,
    "lora_rank": 4,
    "lora_alpha": 8.0,
    "lora_dropout": 0.1,
    "num_ranks": 2,
    "cpus_per_worker": 1,
    "tokens_per_micro_batch": 100,
    "backend": "ray",
    "output_dir": "elsewhere",
    "progress": "plain",
    "report_to": "none",
}
FIT_OWN: dict[str, dict[str, Any]] = {
    "DPO": {"beta": 0.3, "label_smoothing": 0.1, "reference_free": True, "loss_type": "ipo"},
    "ORPO": {"beta": 0.3},
    "KTO": {"beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 2.0},
    "SFT": {"completion_only_loss": False},
    "Reward": {"margin": 0.5, "center_rewards_coefficient": 0.1},
}
FIT_ROWS: dict[str, dict[str, Any]] = {
    "DPO": {"prompt": "1=", "chosen": "1", "rejected": "2"},
    "ORPO": {"prompt": "1=", "chosen": "1", "rejected": "2"},
    "KTO": {"prompt": "1=", "completion": "1", "label": True},
    "SFT": {"prompt": "1=", "completion": "1"},
    "Reward": {"prompt": "1=", "chosen": "1", "rejected": "2"},
}


def field_names(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def made_of_online(kind: str, folder: Path, given: dict[str, Any]) -> Any:
    """What becomes of a GRPO- or RLOOConfig: the run, where it works, and what callbacks get to see."""
    policy, tokenizer = tiny_model()
    plain = {"output_dir": str(folder), "report_to": "none", "use_cpu": True, "save_steps": 500}
    evaluates = given.get("eval_strategy", "no") != "no"
    rows = ROWS[:2] if evaluates else None
    if kind == "GRPO":
        small = {"max_completion_length": 2, "num_generations": 4, "logging_steps": 5}
        args = rl_cluster.GRPOConfig(**plain | small | given)
        trainer: Any = rl_cluster.GRPOTrainer(policy, _score, args, ROWS, rows, tokenizer)
    else:
        config = rl_cluster.RLOOConfig(**plain | {"response_length": 2, "logging_steps": 5} | given)
        trainer = rl_cluster.RLOOTrainer(config, tokenizer, policy, None, _texts, ROWS, eval_dataset=rows)
    run = trainer._run
    seen = (trainer.config.model_dump(), run._address, run._overwrite, told(run.hooks, folder))
    trainer.close()
    return seen, run.hooks.args.load_best_model_at_end


def told(hooks: CallbackHooks, folder: Path) -> Any:
    """At which of twelve steps there is a log, and which of three evaluations is the best."""
    hooks.on_begin(0, 12, folder)
    for step in range(1, 13):
        hooks.on_step(step, {"loss/policy_avg": 0.0})
        if step % 4 == 0:
            hooks.on_evaluate(step, {"eval/score_mean": abs(step - 7), "eval/mean_length": step})
    logged = [row["step"] for row in hooks.state.log_history if "loss/policy_avg" in row]
    return logged, hooks.state.best_global_step, hooks.state.best_metric


def _score(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _texts(texts: list[str]) -> list[float]:
    return [0.0] * len(texts)


def made_of_fit(kind: str, given: dict[str, Any]) -> Any:
    policy, tokenizer = tiny_model()
    config = getattr(rl_cluster, f"{kind}Config")(**given)
    trainer = getattr(rl_cluster, f"{kind}Trainer")(config, policy, tokenizer)
    return trainer._fit_config([FIT_ROWS[kind]]).model_dump()


def save_models(folder: Path) -> None:
    """a, b: the same policy under two names; score-a, score-b: a classifier likewise."""
    policy, tokenizer = tiny_model()
    torch.manual_seed(0)
    one = policy.config.to_dict() | {"num_labels": 1}
    classifier = Qwen2ForSequenceClassification(type(policy.config)(**one))
    for name in ("a", "b"):
        for model, path in ((policy, folder / name), (classifier, folder / f"score-{name}")):
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
