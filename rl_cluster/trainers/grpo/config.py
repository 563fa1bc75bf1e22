"""What a user of GRPOTrainer may set: the names and defaults of TRL's GRPOConfig, and our own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rl_cluster.trainers.arguments import OnlineArguments


@dataclass
class GRPOConfig(OnlineArguments):
    """Settings of a GRPOTrainer; HfArgumentParser reads them from a command line.

    `rl_cluster.trainers.grpo.run_config` says what becomes of each. Batch sizes count completions, steps
    count optimizer updates. A generation batch has per_device_train_batch_size × learner ranks ×
    steps_per_generation completions, num_generations of them for each prompt, and is trained on
    num_iterations times.
    """

    learning_rate: float = field(default=1e-6, metadata={"help": "Of AdamW."})
    logging_steps: float = field(default=10, metadata={"help": "Updates between logs."})
    bf16: bool = field(default=False, metadata={"help": "Forward passes and sampling in bfloat16."})

    num_generations: int = field(default=8, metadata={"help": "Completions per prompt."})
    num_generations_eval: int | None = field(
        default=None, metadata={"help": "The same in evaluations; default: num_generations."}
    )
    max_prompt_length: int | None = field(
        default=512, metadata={"help": "Longer prompts are refused. None: what the model has room for."}
    )
    max_completion_length: int = field(default=256, metadata={"help": "Tokens of a completion, at most."})
    generation_batch_size: int | None = field(
        default=None, metadata={"help": "Completions drawn at a time; in place of steps_per_generation."}
    )
    steps_per_generation: int | None = field(
        default=None,
        metadata={"help": "Micro-batches that a generation serves; default: gradient_accumulation_steps."},
    )
    num_iterations: int = field(default=1, metadata={"help": "Passes over each generation batch, μ."})
    shuffle_dataset: bool = field(default=True, metadata={"help": "A new order in every epoch."})
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "trust_remote_code and dtype, for a model given by name."}
    )

    temperature: float = field(default=1.0, metadata={"help": "Of the sampling."})
    top_p: float = field(
        default=1.0, metadata={"help": "Must stay 1: the ratio is about the whole distribution."}
    )
    top_k: int | None = field(default=0, metadata={"help": "Must stay 0 or None: see top_p."})
    min_p: float | None = field(default=None, metadata={"help": "Refused: see top_p."})
    repetition_penalty: float = field(default=1.0, metadata={"help": "Must stay 1: see top_p."})
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "stop and stop_token_ids."}
    )

    beta: float = field(default=0.0, metadata={"help": "Weight of the divergence from the reference, k3."})
    epsilon: float = field(default=0.2, metadata={"help": "Lower bound of the clip."})
    epsilon_high: float | None = field(
        default=None,
        metadata={"help": "Upper bound of the clip; default: epsilon. cispo: greatest weight; default 5."},
    )
    delta: float | None = field(default=None, metadata={"help": "Refused: two-sided clipping is not there."})
    loss_type: str = field(default="dapo", metadata={"help": "grpo, bnpo, dr_grpo, dapo, cispo or sapo."})
    sapo_temperature_neg: float = field(
        default=1.05, metadata={"help": "sapo: τ where the advantage is not above 0."}
    )
    sapo_temperature_pos: float = field(
        default=1.0, metadata={"help": "sapo: τ where the advantage is above 0."}
    )
    importance_sampling_level: str = field(default="token", metadata={"help": "token, or sequence (GSPO)."})
    scale_rewards: str = field(
        default="group",
        metadata={
            "help": "Divide by the deviation of the group, of the batch, or none; True: group, False: none."
        },
    )
    reward_weights: list[float] | None = field(default=None, metadata={"help": "One per reward; default 1."})
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Completions that were cut off do not train."}
    )
    top_entropy_quantile: float = field(default=1.0, metadata={"help": "Must stay 1."})
    multi_objective_aggregation: str = field(
        default="sum_then_normalize", metadata={"help": "Must stay sum_then_normalize."}
    )
    sync_ref_model: bool = field(default=False, metadata={"help": "Refused: the reference stays as it is."})
    ref_model_mixup_alpha: float = field(default=0.6, metadata={"help": "Refused, with sync_ref_model."})
    ref_model_sync_steps: int = field(default=512, metadata={"help": "Refused, with sync_ref_model."})

    log_completions: bool = field(default=False, metadata={"help": "A table of completions at every log."})
    num_completions_to_print: int | None = field(default=None, metadata={"help": "Rows of it; default 5."})

    use_vllm: bool = field(
        default=False, metadata={"help": "vLLM engines on Ray, where backend is auto; local: refused."}
    )
    vllm_gpu_memory_utilization: float = field(default=0.85, metadata={"help": "On the Ray backend."})
    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "On the Ray backend."})
    disable_dropout: bool = field(
        default=False, metadata={"help": "Train without the dropout of the model's config; lora's stays."}
    )
