"""What a user of RLOOTrainer may set: the names and defaults of TRL's RLOOConfig, and our own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl_cluster.trainers.arguments import OnlineArguments


@dataclass
class RLOOConfig(OnlineArguments):
    """Settings of an RLOOTrainer; HfArgumentParser reads them from a command line.

    `rl_cluster.trainers.rloo.run_config` says what becomes of each. Batch sizes count completions: one update
    batch has per_device_train_batch_size × gradient_accumulation_steps × num_mini_batches × learner ranks of
    them, rloo_k for each prompt.
    """

    exp_name: str = field(default="rloo_config", metadata={"help": "Name of the run."})
    reward_model_path: str = field(
        default="EleutherAI/pythia-160m",
        metadata={"help": "The reward model, where the trainer is not given one."},
    )
    sft_model_path: str = field(
        default="EleutherAI/pythia-160m", metadata={"help": "The policy, where the trainer is not given one."}
    )
    num_ppo_epochs: int = field(default=4, metadata={"help": "Passes over each batch."})
    num_mini_batches: int = field(default=1, metadata={"help": "Updates per pass."})
    total_episodes: int | None = field(
        default=None,
        metadata={"help": "Completions to train on; default: num_train_epochs passes over the data."},
    )
    local_rollout_forward_batch_size: int = field(
        default=64, metadata={"help": "Completions that an engine draws at a time."}
    )
    num_sample_generations: int = field(
        default=10, metadata={"help": "Tables of sampled completions during the run; 0: none."}
    )
    response_length: int = field(default=53, metadata={"help": "Tokens of a completion, at most."})
    stop_token: Literal["eos"] | None = field(
        default=None,
        metadata={"help": "eos: the tokenizer's end token ends a completion, as do the model's own."},
    )
    stop_token_id: int | None = field(
        default=None, metadata={"help": "A token that ends a completion; not together with stop_token."}
    )
    temperature: float = field(default=0.7, metadata={"help": "Of the sampling."})
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the score of completions without an end token."}
    )
    whiten_rewards: bool = field(default=False, metadata={"help": "Divide the rewards by their deviation."})
    kl_coef: float = field(default=0.05, metadata={"help": "Weight of the divergence from the reference."})
    cliprange: float = field(default=0.2, metadata={"help": "The ratio is clipped to 1 ± this."})
    rloo_k: int = field(default=2, metadata={"help": "Completions per prompt."})
    normalize_reward: bool = field(
        default=False, metadata={"help": "Mean 0 and deviation 1 over the batch, then clip."}
    )
    reward_clip_range: float = field(default=10.0, metadata={"help": "Clip, with normalize_reward."})
    normalize_advantage: bool = field(
        default=False, metadata={"help": "Mean 0 and deviation 1, after leave-one-out."}
    )
    token_level_kl: bool = field(
        default=False,
        metadata={"help": "Charge each token for the divergence from it on, not the completion."},
    )

    world_size: int | None = field(default=None, metadata={"help": "Learner ranks; default 1."})
    num_total_batches: int | None = field(default=None, metadata={"help": "Filled in by the trainer."})
    micro_batch_size: int | None = field(default=None, metadata={"help": "Filled in by the trainer."})
    local_batch_size: int | None = field(default=None, metadata={"help": "Filled in by the trainer."})
    batch_size: int | None = field(default=None, metadata={"help": "Filled in by the trainer."})
    local_mini_batch_size: int | None = field(default=None, metadata={"help": "Filled in by the trainer."})
    mini_batch_size: int | None = field(default=None, metadata={"help": "Filled in by the trainer."})
