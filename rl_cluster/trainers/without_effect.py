"""Every accepted name that cannot matter here, with the reason: the list that docs/without_effect.md prints.

A name that is not here acts, or is refused with a remedy. A name that acts only beside another setting is
here with that condition.
"""

from __future__ import annotations

_NO_LOADER = "there is no dataloader: prompts are tokenised once, before the start"
_ENGINE = "evaluations go through the sampling engine, which packs sequences as they fit"
_CLUSTER = "processes and their groups are the cluster's own"
_HUB = "belongs to push_to_hub, which is refused"

TRAINING_ARGUMENTS = {
    "per_device_eval_batch_size": _ENGINE,
    "eval_accumulation_steps": _ENGINE,
    "eval_do_concat_batches": _ENGINE,
    "eval_use_gather_object": _ENGINE,
    "batch_eval_metrics": _ENGINE,
    "prediction_loss_only": "an evaluation's metrics are scores of completions, not losses",
    "include_for_metrics": "there is no compute_metrics; rewards get the prompts' columns",
    "eval_on_start": "with an eval_strategy (else refused): the start is always evaluated",
    "bf16_full_eval": "with bf16 (else refused): evaluations have the dtype of training",
    "dataloader_num_workers": _NO_LOADER,
    "dataloader_pin_memory": _NO_LOADER,
    "dataloader_persistent_workers": _NO_LOADER,
    "dataloader_prefetch_factor": _NO_LOADER,
    "dataloader_multiprocessing_context": _NO_LOADER,
    "dataloader_in_order": _NO_LOADER,
    "dataloader_drop_last": "every batch is whole: the next pass over the prompts fills it",
    "accelerator_config": _NO_LOADER,
    "remove_unused_columns": "all columns reach the rewards, and none the model",
    "label_names": "there are no labels",
    "length_column_name": "sequences are packed by their lengths, which are counted",
    "local_rank": _CLUSTER,
    "ddp_find_unused_parameters": _CLUSTER,
    "ddp_bucket_cap_mb": _CLUSTER,
    "ddp_broadcast_buffers": _CLUSTER,
    "ddp_static_graph": _CLUSTER,
    "ddp_timeout": "deadlines are settings of their own (learner.deadline_seconds and others)",
    "average_tokens_across_devices": "always so: a gradient does not depend on the number of ranks",
    "log_on_each_node": _CLUSTER,
    "save_on_each_node": _CLUSTER,
    "log_level": "the libraries' log goes into the run folder; `progress` decides what is shown",
    "log_level_replica": "the libraries' log goes into the run folder; `progress` decides what is shown",
    "do_train": "train() trains when it is called",
    "do_eval": "evaluate() evaluates when it is called; eval_strategy decides during training",
    "do_predict": "there is no predict()",
    "use_cache": "sampling always has a cache, training never",
    "logging_nan_inf_filter": "a metric that is not finite is written as it is",
    "skip_memory_metrics": "memory is always measured",
    "torch_empty_cache_steps": "the learner frees memory itself where engine and learner share a GPU",
    "gradient_checkpointing_kwargs": "how activations are computed again changes no number",
    "restore_callback_states_from_checkpoint": "a resumed run always restores them",
    "liger_kernel_config": "belongs to use_liger_kernel, which is refused",
    "fsdp_config": "belongs to fsdp, which is refused",
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "trackio_space_id": "belongs to report_to='trackio', which is refused",
    "trackio_bucket_id": "belongs to report_to='trackio', which is refused",
    "trackio_static_space_id": "belongs to report_to='trackio', which is refused",
}

_GATHER = "engines keep weights of their own, and ZeRO-3 shards are streamed to them"
_MAX_STEPS = "where max_steps is given, which then counts, as in transformers"

RLOO = {
    "ds3_gather_for_generation": _GATHER,
    "sft_model_path": "where the trainer is given a policy",
    "reward_model_path": "where the trainer is given a reward_model",
    "reward_clip_range": "without normalize_reward, as in TRL",
    "num_train_epochs": "where max_steps or total_episodes is given, which then counts",
}

GRPO = {
    "ds3_gather_for_generation": _GATHER,
    "sapo_temperature_neg": "where loss_type is not sapo",
    "sapo_temperature_pos": "where loss_type is not sapo",
    "num_completions_to_print": "without log_completions",
    "num_generations_eval": "without an eval_dataset",
    "vllm_gpu_memory_utilization": "on the local backend, which has no engine, and on CPUs",
    "num_train_epochs": _MAX_STEPS,
}

PPO = {
    "model_name": "where the trainer is given a model",
    "epochs": "for a loop of your own, `range(config.epochs)`; train() counts num_iterations",
    "target_kl": "without early_stopping",
    "kl_target": "where β is fixed (adap_kl_ctrl=False, or β = 0)",
    "kl_horizon": "where β is fixed (adap_kl_ctrl=False, or β = 0)",
    "target": "where β is fixed (adap_kl_ctrl=False, or β = 0)",
    "horizon": "where β is fixed (adap_kl_ctrl=False, or β = 0)",
    "eval_every": "without eval_prompts",
    "temperature": "in train(env), where the environment says with what its actions are sampled",
    "reward_timeout_seconds": "in train(env): the environment pays; rollout.deadline_seconds limits it",
}

FIT = {
    "model_name": "where the trainer is given a model",
    "eval_every": "without an eval_dataset",
    "max_prompt_length": "of whole texts (SFTTrainer on strings or rows of text), which have no prompt",
    "completion_only_loss": "of whole texts (SFTTrainer on strings or rows of text), which train as a whole",
}

REWARD_MODEL = {
    "model_name": "where the model is given a base_model",
    "dtype": "where the model is given a base_model that is a module, which has its own",
    "lora_rank": "without use_lora",
    "lora_alpha": "without use_lora",
    "lora_dropout": "without use_lora",
}

LLM = {
    "--train-split": "where --data-path is a file",
    "--epochs": "where --max-steps is given, which then counts",
    "--max-prompt-length": "of whole texts (--trainer sft on a column of texts), which have no prompt",
}

LOSSES = {
    "VarianceLoss.compute_loss: targets": "there so that the loss can stand in a CompositeLoss",
    "CompositeLoss config: reduction": "where the losses inside have reduced: give them reduction='none'",
    "AdaptiveLoss config: reduction": "where the loss inside has reduced: give it reduction='none'",
}

WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "RLOOConfig and GRPOConfig, from TrainingArguments": TRAINING_ARGUMENTS,
    "RLOOConfig": RLOO,
    "GRPOConfig": GRPO,
    "PPOConfig": PPO,
    "DPOConfig, ORPOConfig, KTOConfig, SFTConfig, RewardConfig": FIT,
    "RewardModelConfig": REWARD_MODEL,
    "rl-cluster llm": LLM,
    "Losses": LOSSES,
}
"""Front -> name -> why, or when, it cannot matter."""


def page() -> str:
    """docs/without_effect.md."""
    parts = [
        "# Accepted, and without effect\n",
        "Every setting of a front acts, is refused with a remedy, or stands on this page. A condition says "
        "when the name has no effect; without one it never has. Printed from "
        "`rl_cluster/trainers/without_effect.py`.\n",
    ]
    for front, names in WITHOUT_EFFECT.items():
        rows = "".join(f"| `{name}` | {reason} |\n" for name, reason in names.items())
        parts.append(f"## {front}\n\n| name | why, or when |\n|---|---|\n{rows}")
    return "\n".join(parts)
