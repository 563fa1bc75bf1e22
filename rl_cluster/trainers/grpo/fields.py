"""What becomes of the fields that GRPOConfig adds to TrainingArguments: what they set, or why not here."""

from __future__ import annotations

from typing import Any

OWN_FIELDS = {
    "num_generations": "batch.samples_per_prompt",
    "num_generations_eval": "eval.samples_per_prompt",
    "max_prompt_length": "longer prompts are refused (TRL cut them)",
    "max_completion_length": "rollout.max_new_tokens",
    "generation_batch_size": "batch.prompts_per_step × samples_per_prompt",
    "steps_per_generation": "batch.prompts_per_step and algorithm.num_mini_batches",
    "num_iterations": "algorithm.num_epochs",
    "shuffle_dataset": "data.shuffle",
    "model_init_kwargs": "model.trust_remote_code, model.dtype",
    "temperature": "rollout.temperature and eval.temperature",
    "generation_kwargs": "rollout.stop, rollout.stop_token_ids",
    "beta": "algorithm.kl.coef, k3 in the loss",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "loss_type": "algorithm.loss.kind and aggregation",
    "sapo_temperature_neg": "algorithm.loss.temperature_negative",
    "sapo_temperature_pos": "algorithm.loss.temperature_positive",
    "importance_sampling_level": "algorithm.loss.ratio",
    "scale_rewards": "algorithm.scale",
    "reward_weights": "rewards.scorers.*.weight",
    "mask_truncated_completions": "algorithm.loss.mask_truncated",
    "log_completions": "log.samples_every",
    "num_completions_to_print": "log.num_samples",
    "use_vllm": "cluster.backend: ray, where the backend is left open",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_fraction",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "warmup_ratio": "optimizer.warmup_steps",
    "overwrite_output_dir": "an earlier run in output_dir is deleted",
    "backend": "cluster.backend",
    "cluster": "the Ray cluster to connect to",
    "progress": "log.progress",
    "settings": "anything by its dotted name",
}
"""Field of GRPOConfig that TrainingArguments has not -> what it sets in the RunConfig."""

_WHOLE = "the importance ratios are about the whole distribution, not a part of it"
OWN_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "top_p": ((1.0,), _WHOLE),
    "top_k": ((0, -1, None), _WHOLE),
    "min_p": ((None, 0.0), _WHOLE),
    "repetition_penalty": ((1.0,), _WHOLE),
    "delta": ((None,), "lower epsilon_high, or take loss_type='sapo'"),
    "top_entropy_quantile": ((1.0,), "all tokens of a completion train"),
    "multi_objective_aggregation": (("sum_then_normalize",), "weigh the rewards with reward_weights"),
    "sync_ref_model": ((False,), "the reference stays as it is; start again from the exported model"),
    "ref_model_mixup_alpha": ((0.6,), "it belongs to sync_ref_model; the reference stays as it is"),
    "ref_model_sync_steps": ((512,), "it belongs to sync_ref_model; the reference stays as it is"),
}
