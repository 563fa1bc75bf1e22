"""What a rollout is asked for (GroupTask) and what it returns (TrajectoryGroup, GroupSummary)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt data, tokenised once and for all.

    tokens: int32 [P], what the engine receives. text: the same, readable.
    metadata: the row's other columns (for example `answer`), passed to the scorers.
    """

    prompt_id: str
    tokens: np.ndarray
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingSpec:
    """How tokens are drawn. stop strings end a response and stay in its tokens. ignore_eos: the model's own
    end tokens do not end it, unless stop_token_ids holds them."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def ends(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end a response of a model with these end tokens."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)


def is_truncated(sampling: SamplingSpec) -> bool:
    """Whether some tokens may not be drawn."""
    return sampling.top_p < 1 or sampling.top_k > 0


@dataclass(frozen=True)
class GroupTask:
    """The order to sample `len(seeds)` responses to one prompt.

    group_id: position in the run's prompt stream, unique within a run (evaluation uses negative ids).
    seeds: one per sample, derived from (run seed, group, sample, turn), so that the answer does not
    depend on which worker takes the task or on the attempt.
    """

    group_id: int
    prompt: Prompt
    seeds: tuple[int, ...]
    sampling: SamplingSpec

    @property
    def num_samples(self) -> int:
        return len(self.seeds)


@dataclass(frozen=True)
class Trajectory:
    """One episode as tokens, T of them, prompt included. Arrays are aligned on the token itself:
    `behaviour_logprobs[t]` is the log-probability with which token t was drawn.

    tokens: int32 [T]. action_mask: bool [T], True where the policy drew the token.
    behaviour_logprobs: float32 [T], natural log at the temperature used, among all tokens (also where top-k
    or top-p left only some), 0 where not an action, NaN where unknown.
    policy_versions: int32 [T], the weights that drew the token, -1 where not an action.
    response_text: what follows the prompt, the answers of an environment included.
    reward: the sum of what an environment paid, None without one. components: its last metrics.
    """

    tokens: np.ndarray
    action_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: FinishReason
    response_text: str
    ended_with_eos: bool
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.tokens.shape
        assert self.tokens.ndim == 1 and self.tokens.dtype == np.int32
        assert self.action_mask.shape == shape and self.action_mask.dtype == np.bool_
        assert self.behaviour_logprobs.shape == shape and self.behaviour_logprobs.dtype == np.float32
        assert self.policy_versions.shape == shape and self.policy_versions.dtype == np.int32
        assert not self.action_mask[0], "the first token of a sequence has no prediction"


@dataclass(frozen=True)
class TrajectoryGroup:
    """The samples of one prompt, in the order of the task's seeds."""

    group_id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    def summary(self, worker: str, seconds: float) -> GroupSummary:
        versions = np.concatenate([t.policy_versions[t.action_mask] for t in self.trajectories])
        return GroupSummary(
            group_id=self.group_id,
            prompt_id=self.prompt.prompt_id,
            lengths=tuple(len(t.tokens) for t in self.trajectories),
            action_counts=tuple(int(t.action_mask.sum()) for t in self.trajectories),
            ended_with_eos=tuple(t.ended_with_eos for t in self.trajectories),
            truncated=tuple(t.finish_reason == "length" for t in self.trajectories),
            min_version=int(versions.min()),
            max_version=int(versions.max()),
            worker=worker,
            seconds=seconds,
        )


@dataclass(frozen=True)
class GroupSummary:
    """The little that the driver needs to know of a group; the arrays stay where they were made.

    lengths: tokens per sample, prompt included. action_counts: drawn tokens per sample.
    min_version, max_version: over all drawn tokens. seconds: wall time of the generation.
    """

    group_id: int
    prompt_id: str
    lengths: tuple[int, ...]
    action_counts: tuple[int, ...]
    ended_with_eos: tuple[bool, ...]
    truncated: tuple[bool, ...]
    min_version: int
    max_version: int
    worker: str
    seconds: float


@dataclass(frozen=True)
class Scores:
    """A scorer's answer for one group. values: float64 [n]. components: name -> float64 [n].

    Finite, or NaN where the scorer said None: that sample has no such reward, which is not a reward of 0.
    """

    name: str
    values: np.ndarray
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class ScoreFailure:
    """A scorer could not answer for one group: never a score of 0.

    kind: what happened; message: one line; traceback: the scorer's own, for the user.
    """

    name: str
    kind: Literal["raised", "timeout", "not_finite", "wrong_length", "died"]
    message: str
    traceback: str = ""
