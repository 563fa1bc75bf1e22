"""Where prompts come from, for training and for evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rl_cluster.config.base import Config, LocalPath


class FileSource(Config):
    """JSONL, CSV, Parquet, or a folder written by `datasets.save_to_disk`."""

    source: Literal["jsonl", "csv", "parquet", "dataset"]
    path: LocalPath
    eval_path: LocalPath | None = None
    """Held-out rows; default: the last `held_out` rows of path."""
    prompt_column: str = "prompt"
    """A string, a list of chat messages {role, content} rendered with the tokenizer's own template, or a list
    of token ids, taken as they are."""


class AdditionSource(Config):
    """n-digit addition, made on the spot; metadata: answer, a, b. The split is by operand pair."""

    source: Literal["addition"]
    num_digits: PositiveInt = 2
    size: PositiveInt = 10_000
    """At most so many training prompts; every pair is used in both orders."""
    template: str = "{a}+{b}="
    """With `chat`, the user's message."""
    chat: bool = False
    answer_digits: PositiveInt = 1
    """The answer is written with leading zeros up to so many digits."""


class ReasoningGymSource(Config):
    """A family of the reasoning-gym package by name; metadata: answer, and the entry for its own scorer."""

    source: Literal["reasoning_gym"]
    family: str
    options: dict[str, Any] = {}
    size: PositiveInt = 1000
    chat: bool = False


class DataConfig(Config):
    train: Annotated[FileSource | AdditionSource | ReasoningGymSource, Field(discriminator="source")]
    max_prompt_tokens: PositiveInt = 512
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """Malformed, empty or over-long rows: stop before anything starts, or leave out and count."""
    held_out: NonNegativeInt = 200
    """Rows kept from training, for evaluation."""
    shuffle: bool = True


class EvalConfig(Config):
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before the first and after the last step."""
    num_prompts: PositiveInt = 100
    samples_per_prompt: PositiveInt = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: PositiveInt | None = None
    """Default: rollout.max_new_tokens."""
    pass_at: tuple[int, ...] = (1,)
    success_threshold: PositiveFloat = 1.0
    """A score of at least this counts as correct for accuracy and pass@k."""
