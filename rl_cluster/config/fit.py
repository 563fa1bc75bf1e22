"""The configuration of training on fixed data (`fit`): SFT, DPO, ORPO, KTO and reward models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rl_cluster.config.algorithm import Fraction
from rl_cluster.config.base import Config, LocalPath
from rl_cluster.config.health import FitHealthConfig
from rl_cluster.config.run import (
    CheckpointConfig,
    ClusterConfig,
    LearnerConfig,
    ModelConfig,
    OptimizerConfig,
)


class SFT(Config):
    """Supervised fine-tuning: cross-entropy, mean over the trained tokens of the optimizer step."""

    name: Literal["sft"] = "sft"
    rows: Literal["completion", "messages", "text"] = "completion"
    """completion: columns prompt and completion. messages: chats, the last message is the answer.
    text: whole texts."""
    train_on: Literal["completion", "all"] = "completion"
    """all: prompts train too (of rows of text, everything always does)."""


class DPO(Config):
    """Rafailov et al. 2023, and kin. Columns prompt, chosen, rejected."""

    name: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a label is wrong (conservative DPO); sigmoid only."""
    reference_free: bool = False
    """The reference is taken to be uniform; none is computed."""
    reference_model: LocalPath | None = None
    """A folder or hub name; default: the model as it is before its first update (adapters off)."""


class ORPO(Config):
    """Hong et al. 2024. Columns prompt, chosen, rejected; no reference."""

    name: Literal["orpo"] = "orpo"
    coef: PositiveFloat = 0.1
    """λ of the odds-ratio term."""


class KTO(Config):
    """Ethayarajh et al. 2024. Columns prompt, completion, label (true: desirable)."""

    name: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    desirable_weight: NonNegativeFloat = 1.0
    undesirable_weight: NonNegativeFloat = 1.0
    reference_model: LocalPath | None = None
    """As in dpo."""


class RewardObjective(Config):
    """A reward model on pairs (Bradley-Terry). Columns chosen, rejected, and prompt where there is one."""

    name: Literal["reward"] = "reward"
    margin: NonNegativeFloat = 0.0
    """By how much the chosen score must win; a column of margins comes on top."""
    centre: NonNegativeFloat = 0.0
    """Weight of (r_chosen + r_rejected)², which keeps scores near 0."""


Objective = Annotated[SFT | DPO | ORPO | KTO | RewardObjective, Field(discriminator="name")]


class FitSection(Config):
    """Steps are optimizer updates."""

    dir: str | None = None
    """Run folder; default runs/NAME-DATE-TIME."""
    name: str = "fit"
    seed: NonNegativeInt = 0
    epochs: PositiveInt = 1
    """Passes over the data; the last batch of a pass may be smaller."""
    steps: PositiveInt | None = None
    """Optimizer steps, instead of epochs."""


class FitDataConfig(Config):
    """Where the rows come from, what their columns are called, and how long they may be."""

    source: Literal["jsonl", "csv", "parquet", "dataset", "given"] = "jsonl"
    """given: the calling process hands the rows over."""
    path: LocalPath | None = None
    eval_path: LocalPath | None = None
    """Held-out rows; default: the last `held_out` rows of path."""
    held_out: NonNegativeInt = 0
    """Rows kept from training, for evaluation."""
    prompt_column: str = "prompt"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    completion_column: str = "completion"
    label_column: str = "label"
    messages_column: str = "messages"
    text_column: str = "text"
    margin_column: str | None = None
    """Reward models: each pair's own margin."""
    max_length: PositiveInt = 1024
    """Tokens of prompt and response together; longer responses lose their end (and their end token)."""
    max_prompt_length: PositiveInt = 512
    """Longer prompts lose their start."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    shuffle: bool = True
    """A new order in every epoch, from the seed."""


class FitBatchConfig(Config):
    rows_per_step: PositiveInt = 16
    """Examples of an optimizer step (pairs count as one), over all ranks; accumulation follows from it."""
    tokens_per_micro_batch: PositiveInt = 8192
    """Packed tokens at a time, per rank; a longer example stands alone."""


class FitEvalConfig(Config):
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before the first and after the last step."""
    at_start: bool = True


class FitLogConfig(Config):
    tensorboard: bool = True
    wandb_project: str | None = None
    progress: Literal["auto", "rich", "plain", "none"] = "auto"


class FitConfig(Config):
    """Everything about one fit. Frozen; the resolved copy is saved as config.yaml in the run folder."""

    run: FitSection = FitSection()
    model: ModelConfig
    data: FitDataConfig
    objective: Objective
    batch: FitBatchConfig = FitBatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    warmup_ratio: Fraction = 0.0
    """Share of the steps in which the learning rate rises; instead of optimizer.warmup_steps."""
    learner: LearnerConfig = LearnerConfig()
    cluster: ClusterConfig = ClusterConfig()
    eval: FitEvalConfig = FitEvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    health: FitHealthConfig = FitHealthConfig()
    log: FitLogConfig = FitLogConfig()
