"""Scorers and what is done to their scores before the advantages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rl_cluster.config.base import Config, LocalPath


class _Scorer(Config):
    name: str | None = None
    """Shown in the metrics as rewards/NAME; default: the kind, or the function's name."""
    weight: float = 1.0
    timeout_seconds: PositiveFloat = 60.0

    built_in: ClassVar[str | None] = None
    """`package.module:function` behind a built-in kind; the kind's own fields are its options."""

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Of a prompt's metadata, without which there is nothing to score against."""
        return ()


COMMON_FIELDS = frozenset(_Scorer.model_fields)
"""What every scorer has; a kind's further fields are options of its function."""


class FunctionScorer(_Scorer):
    """`f(prompts, responses, metadata) -> list[float | None | dict[str, float | None]]`, sync or async.

    None: this sample has no reward of this scorer. It is in no mean and no baseline, and with no reward of
    any scorer its advantage is 0.
    """

    kind: Literal["function"] = "function"
    function: str
    """Import path `package.module:function`, or `path/to/file.py:function`."""
    options: dict[str, Any] = {}
    """Passed as keyword arguments."""
    num_workers: PositiveInt = 1
    groups_per_call: PositiveInt = 1
    """Groups that wait for a worker are handed to the function together, up to so many."""


class ExactMatchScorer(_Scorer):
    """1 if the response equals metadata[answer_key] after stripping white space, else 0."""

    kind: Literal["exact_match"] = "exact_match"
    answer_key: str = "answer"
    extract: Literal["all", "last_number"] = "all"
    """last_number: compare with the last number in the response."""
    built_in: ClassVar[str | None] = "rl_cluster.rewards.functions:exact_match"

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return (self.answer_key,)


class MathScorer(_Scorer):
    """1 if math-verify finds the response equivalent to metadata[answer_key], else 0.

    A response that cannot be evaluated within 2 s of processor time and 1 GiB is wrong.
    """

    kind: Literal["math"] = "math"
    answer_key: str = "answer"
    unreadable: Literal["refuse", "exact_text"] = "refuse"
    """Right answers that are no mathematics ("Paris"): refuse such data before the start, or compare text."""
    built_in: ClassVar[str | None] = "rl_cluster.rewards.functions:math_match"

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return (self.answer_key,)


class RewardModelScorer(_Scorer):
    """A sequence-classification checkpoint; the score is its first logit on prompt + response tokens."""

    kind: Literal["reward_model"] = "reward_model"
    path: LocalPath
    num_workers: PositiveInt = 1
    tokens_per_batch: PositiveInt = 16384
    """Requests are gathered into batches of at most so many tokens, padding included."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class CallableScorer(_Scorer):
    """A function object that the caller of the library hands over; it runs in the caller's process."""

    kind: Literal["callable"] = "callable"
    name: str


class EnvironmentScorer(_Scorer):
    """What the environment of the run (rollout.environment) has paid for the episode."""

    kind: Literal["environment"] = "environment"


class ReasoningGymScorer(_Scorer):
    """The family's own score_answer."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    built_in: ClassVar[str | None] = "rl_cluster.rewards.functions:reasoning_gym_score"

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return ("family", "options", "entry")


ScorerConfig = Annotated[
    FunctionScorer
    | ExactMatchScorer
    | MathScorer
    | RewardModelScorer
    | ReasoningGymScorer
    | CallableScorer
    | EnvironmentScorer,
    Field(discriminator="kind"),
]


def scorer_name(scorer: ScorerConfig) -> str:
    """As in the metrics rewards/NAME."""
    if scorer.name is not None:
        return scorer.name
    return scorer.function.rpartition(":")[2] if isinstance(scorer, FunctionScorer) else scorer.kind


class ShapingConfig(Config):
    """Applied to the weighted sum of the scores, in this order."""

    missing_eos_penalty: NonNegativeFloat | None = None
    """Subtracted from samples that did not come to an end of their own: with one of the model's end tokens, a
    stop token or a stop string (TRL's EOS trick)."""
    overlong_buffer: NonNegativeInt = 0
    """DAPO: the last so many tokens before max_new_tokens are penalised linearly, up to overlong_penalty."""
    overlong_penalty: NonNegativeFloat = 1.0
    length_penalty: NonNegativeFloat = 0.0
    """Subtracted per drawn token."""
    normalize: Literal["none", "batch", "running"] = "none"
    """(s − mean) / (std + 1e-8) over the batch, or over all scores so far."""
    clip: PositiveFloat | None = None
    """Clip to ±clip, after normalisation."""


class RewardConfig(Config):
    scorers: Annotated[tuple[ScorerConfig, ...], Field(min_length=1)]
    shaping: ShapingConfig = ShapingConfig()
    on_failure: Literal["retry", "drop"] = "retry"
    """A group whose scorer failed is scored again (max_retries times), then dropped; or dropped at once."""
    max_retries: NonNegativeInt = 2
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Above this share of failed groups (of the last 50 or more) the run stops with the scorer's error."""
