"""The sections of a run's configuration, as pydantic models. Units and meanings are in the docstrings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rl_cluster.config.algorithm import GRPO, AlgorithmConfig
from rl_cluster.config.base import Config, LocalPath
from rl_cluster.config.data import DataConfig, EvalConfig
from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.config.health import HealthConfig
from rl_cluster.config.reward import RewardConfig


class RunSection(Config):
    dir: str | None = None
    """Run folder; default runs/NAME-DATE-TIME."""
    name: str = "run"
    seed: NonNegativeInt = 0
    steps: PositiveInt = 100
    """Optimizer steps to take, counted in batches (a batch may take several updates)."""
    max_updates: PositiveInt | None = None
    """Optimizer updates in all, where the last step makes fewer than the others; default: all of its."""


class LoRAConfig(Config):
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class ScratchModel(Config):
    """A char-level Qwen2 made on the spot, for trying things out without a download."""

    alphabet: str = "0123456789+-*/=() "
    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    intermediate_size: PositiveInt = 512
    max_positions: PositiveInt = 256


class SupervisedConfig(Config):
    """A supervised run before the reinforcement learning, by the same learner."""

    steps: PositiveInt = 300
    rows_per_step: PositiveInt = 128
    learning_rate: PositiveFloat = 1e-3
    warmup_steps: NonNegativeInt = 20
    correct_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of demonstrations that show the row's `answer`; the others have one character wrong."""


class ModelConfig(Config):
    path: LocalPath | None = None
    """A Hugging Face folder or hub name. Exactly one of path and scratch."""
    reference_path: LocalPath | None = None
    """Folder or hub name of the reference; default: the policy as it starts."""
    scratch: ScratchModel | None = None
    supervised: SupervisedConfig | None = None
    """Train the model on demonstrations of the data before reinforcement learning."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the engine and of the learner's forward pass; the optimizer's master weights are float32."""
    lora: LoRAConfig | None = None
    disable_dropout: bool = False
    """Train without the dropout of the model's own config (GPT-2's 0.1; most newer models have none), which
    makes a loss's log-probabilities differ from the engine's. That of lora stays."""
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False


class BatchConfig(Config):
    """The only three batch-size knobs; `--dry-run` prints what follows from them."""

    prompts_per_step: PositiveInt = 16
    samples_per_prompt: PositiveInt = 8
    tokens_per_micro_batch: PositiveInt = 8192
    dynamic_sampling: bool = False
    """DAPO: groups whose scores are all equal are dropped and replaced by fresh ones."""
    dynamic_sampling_limit: PositiveInt = 10
    """Stop with NoSignalError after so many batches' worth of dropped groups in a row."""


class RolloutConfig(Config):
    num_workers: PositiveInt = 1
    tensor_parallel_size: PositiveInt = 1
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Below 1 only where a loss has no importance ratio; log-probabilities, and the divergence made of them,
    are those among all tokens, whatever top_p and top_k leave."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """As top_p."""
    max_new_tokens: PositiveInt = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_concurrent_sequences: PositiveInt = 256
    """Per engine."""
    kv_cache_gib: PositiveFloat = 1.0
    """CPU engines."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    enforce_eager: bool | None = None
    """None: eager on CPUs, CUDA graphs on GPUs."""
    environment: EnvironmentConfig | None = None
    """What answers the policy in its episodes; None: an episode is one response."""
    deadline_seconds: PositiveFloat = 600.0
    """For one group; start-up is limited by cluster.start_deadline_seconds."""


class OptimizerConfig(Config):
    learning_rate: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0


class LearnerConfig(Config):
    num_ranks: PositiveInt = 1
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 3
    offload_optimizer: bool = False
    deadline_seconds: PositiveFloat = 1800.0


class AsyncConfig(Config):
    max_policy_lag: NonNegativeInt = 0
    """0: synchronous, on-policy. k: a group may be trained up to k updates after it was begun."""
    in_flight_updates: bool = True
    """Publish into running generations (pause, update, resume) rather than waiting for them to end."""
    importance_cap: PositiveFloat | Literal["off"] | None = None
    """Truncation of the weight proximal/behaviour (decoupled objective), which makes up for experience of
    older weights and for an engine that computes otherwise than the learner; at any lag. off: no weight.
    None: 2 at a lag above 0 and in bfloat16, else off."""


class SyncConfig(Config):
    backend: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """auto: gloo on CPUs, ipc when learner and engine share a GPU, nccl otherwise."""
    bucket_mib: PositiveInt = 256
    deadline_seconds: PositiveFloat = 300.0


class ClusterConfig(Config):
    backend: Literal["ray", "local"] = "ray"
    """local: everything in this process, without Ray, vLLM or DeepSpeed; for small models, one machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    colocate: bool = False
    """Learner and engine take turns on the same GPUs (vLLM sleep mode, optimizer offload)."""
    cpus_per_worker: PositiveInt | None = None
    """Threads of each rollout worker, learner rank and reference; default: derived from the machine."""
    start_deadline_seconds: PositiveFloat = 600.0
    num_nodes: PositiveInt = 1
    """Equal machines in the Ray cluster."""
    num_gpus_per_node: NonNegativeInt | None = None
    """Plan for machines other than this one (--dry-run)."""
    num_cpus_per_node: PositiveInt | None = None
    gpu_memory_gib: PositiveFloat | None = None


class CheckpointConfig(Config):
    every: NonNegativeInt = 0
    """Steps between checkpoints; 0: by time alone. With 0 here and in `minutes` there are none."""
    minutes: NonNegativeFloat = 10.0
    """Write one, too, when the last was so long ago; 0: by steps alone."""
    exit_seconds: PositiveFloat = 120.0
    """Longest time that the update under way and a last checkpoint may take after a signal or a failure."""
    keep_last: PositiveInt = 2
    keep_best: bool = True


class LogConfig(Config):
    samples_every: NonNegativeInt = 10
    """Steps between tables of sampled completions; 0: never."""
    num_samples: PositiveInt = 5
    trajectories: bool = True
    """Write every trained trajectory (tokens, log-probabilities, advantages) to the run folder."""
    tensorboard: bool = True
    wandb_project: str | None = None
    progress: Literal["auto", "rich", "plain", "none"] = "auto"


class RunConfig(Config):
    """Everything about one run. Frozen; the resolved copy is saved as config.yaml in the run folder."""

    run: RunSection = RunSection()
    model: ModelConfig
    data: DataConfig
    rewards: RewardConfig
    batch: BatchConfig = BatchConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = GRPO()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    asynchrony: AsyncConfig = Field(default=AsyncConfig(), alias="async")
    sync: SyncConfig = SyncConfig()
    cluster: ClusterConfig = ClusterConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    health: HealthConfig = HealthConfig()
    log: LogConfig = LogConfig()


DEFAULT_IMPORTANCE_CAP = 2.0


def importance_cap(config: RunConfig) -> float | None:
    """The greatest weight proximal/behaviour of a token, or None where tokens have no such weight.

    Truncated sampling draws from another distribution than the learner computes, so there is none by default.
    """
    given = config.asynchrony.importance_cap
    if given is not None:
        return None if given == "off" else given
    differs = config.asynchrony.max_policy_lag > 0 or config.model.dtype == "bfloat16"
    truncated = config.rollout.top_p < 1 or config.rollout.top_k > 0
    return DEFAULT_IMPORTANCE_CAP if differs and not truncated else None
