"""LearnerSpec: everything that a learner rank must know, as one frozen object that travels to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl_cluster.config.run import LoRAConfig, OptimizerConfig

Kind = Literal["policy", "policy_with_values", "critic", "reward"]

KIND_IN_CHECKPOINTS: dict[Kind, str] = {
    "policy": "none",
    "policy_with_values": "shared",
    "critic": "separate",
    "reward": "reward",
}
"""What a checkpoint's learner.json has under `critic`, so that those of before can be loaded."""


@dataclass(frozen=True)
class LearnerSpec:
    """One learner. kind: a policy, a policy with a value head on its trunk, a critic of its own (values only,
    no log-probabilities), or a reward model (a sequence classifier whose score is the value; see
    modeling/score_model.py).

    model_path: Hugging Face folder or hub name. temperature: of the sampling, for `forward`.
    max_new_tokens: for the aggregation "constant". tokens_per_micro_batch: packed tokens at a time, per
    rank. total_steps: optimizer updates that the learning-rate schedule spans (not the run's steps where a
    step takes several updates). dtype: of the weights and the forward pass; master weights and Adam moments
    are float32. reference_path: a frozen model beside the policy, for the exact KL of reference passes.
    engine: deepspeed shards by zero_stage; torch is plain AdamW, replicated over the ranks. num_threads: of
    PyTorch per rank, None: its default. deadline_seconds: for any one call; start_deadline_seconds: for all
    ranks to be up. persist_below: ZeRO-3 keeps parameters smaller than so many numbers gathered (None:
    DeepSpeed's default, 100,000). pad_token_id: of a reward model's config.
    """

    model_path: str
    temperature: float = 1.0
    max_new_tokens: int = 128
    tokens_per_micro_batch: int = 8192
    total_steps: int = 1
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: Literal["float32", "bfloat16"] = "float32"
    kind: Kind = "policy"
    lora: LoRAConfig | None = None
    disable_dropout: bool = False
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    engine: Literal["deepspeed", "torch"] = "deepspeed"
    zero_stage: int = 3
    offload_optimizer: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int | None = None
    seed: int = 0
    deadline_seconds: float = 1800.0
    start_deadline_seconds: float = 600.0
    persist_below: int | None = None
    pad_token_id: int | None = None
    reference_path: str | None = None

    def __post_init__(self) -> None:
        assert not (self.kind == "critic" and self.lora is not None), "a separate critic has no adapters"
        assert 0 <= self.zero_stage <= 3
