"""What an environment shows (Observation), what a step answers (StepResult), what remains (Trajectory)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Action = int | torch.Tensor | Sequence[int]
"""A token id, or several: an int, a tensor of one or many (any shape that is one row), or a list."""


@dataclass(frozen=True)
class Observation:
    """input_ids, attention_mask: int64 [1, T], prompt and what was generated, ready for a model's forward.

    metadata: facts about the episode, for example prompt_idx, steps, temperature.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    prompt: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """reward: for this step. done: the episode is over, and next_observation is None.

    info: what happened, for people. metrics: numbers to log.
    """

    reward: float
    done: bool
    next_observation: Observation | None = None
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """A whole episode, one entry per step: what was seen, done, paid, and the actions' log-probabilities.

    actions: int64 [n] each. logprobs: float32 [n] each, natural log. metrics: those of the last step.
    """

    observations: list[Observation]
    actions: list[torch.Tensor]
    rewards: list[float]
    logprobs: list[torch.Tensor] = field(default_factory=list)
    done: bool = False
    total_reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)


class RLEnvironment(ABC):
    """An environment of one's own: `reset` starts an episode, `step` takes tokens and pays a reward.

    What a training run looks for besides, all optional:
    wants_tokens = True: one token per step, rather than a whole response.
    start(prompt, metadata, seed) -> Observation: begin the episode of this prompt (else: start_environment).
    take_end_tokens(ids): the end tokens of the model that plays, told once, before the first episode.
    truncate() -> StepResult | None: the run ends the episode at a limit; pay what is due.
    close(): the run is over.
    And of a last step info["tokens_taken"]: how many of its tokens belong to the episode.
    """

    wants_tokens: bool = False

    @abstractmethod
    def reset(self) -> Observation:
        """Start the next episode."""

    @abstractmethod
    def step(self, action: Any) -> StepResult:
        """Take an action (tokens, see Action)."""

    def render(self) -> str:
        """The present state, for people."""
        return f"{type(self).__name__}()"
