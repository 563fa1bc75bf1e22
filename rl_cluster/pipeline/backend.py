"""What the pipeline asks of whoever holds the model: in this process (torch) or on a cluster (learner).

The check_… methods run in the caller's thread, before a call is queued, and raise BadInputError; all others
run on the pipeline's one thread, in order, and leave everything as it was when they raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_cluster.pipeline.inputs import TokenInputs
from rl_cluster.pipeline.losses import BuiltInLoss
from rl_cluster.pipeline.outputs import ForwardBackwardOutput, OptimStepOutput


@dataclass(frozen=True)
class CallableLoss:
    """The user's own loss. takes_model: called as f(model, inputs, outputs, **kwargs) and must return a
    scalar; otherwise as f(outputs, labels, **kwargs), which may return (scalar, metrics) too. Either may
    return a WeightedLoss."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    takes_model: bool


@dataclass(frozen=True)
class SampleRequest:
    """Checked arguments of sample(). seed: of this call's own generator. stop_strings need a tokenizer.

    ignore_eos: stops were given, so the model's own end tokens are none, unless stop_token_ids holds them.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    seed: int
    ignore_eos: bool = False


@dataclass
class Accumulation:
    """The calls since the last optimizer step. weight: of all of them, in trained tokens."""

    calls: int = 0
    weight: float = 0.0

    def add(self, weight: float) -> None:
        self.calls, self.weight = self.calls + 1, self.weight + weight

    def clear(self) -> None:
        self.calls, self.weight = 0, 0.0


@dataclass(frozen=True)
class StepRequest:
    """Checked arguments of optim_step(). optimizer: a torch optimizer, or OptimParams (or None) on a cluster.
    max_grad_norm: 0 for no clipping. min_calls: with fewer accumulated the step is skipped."""

    optimizer: Any
    scheduler: Any
    max_grad_norm: float
    min_calls: int


@dataclass(frozen=True)
class SavedState:
    """Where a backend wrote its files, relative names within the checkpoint folder."""

    model: str
    optimizer: str | None
    state: str
    files: tuple[str, ...] = field(default=())


class Backend(Protocol):
    vocab_size: int | None
    max_positions: int | None
    eos_token_ids: tuple[int, ...]
    accepts_callables: bool
    accumulation: Accumulation

    def check_tokens(self, tokens: TokenInputs, loss: BuiltInLoss | None) -> None: ...

    def check_optimizer(self, optimizer: Any, scheduler: Any) -> None: ...

    def check_sampling(self, stop_strings: tuple[str, ...], tokenizer: Any) -> None: ...

    def forward_backward(
        self, tokens: TokenInputs, loss: BuiltInLoss | CallableLoss, return_gradients: bool
    ) -> ForwardBackwardOutput: ...

    def optim_step(self, request: StepRequest) -> OptimStepOutput: ...

    def forward(
        self, tokens: TokenInputs, temperature: float, reference: bool
    ) -> dict[str, torch.Tensor | None]:
        """logits [B, L, V] (None on a cluster) and logprobs [B, L]."""
        ...

    def save(self, folder: Path) -> SavedState:
        """Write into an empty folder that becomes the checkpoint when this has returned."""
        ...

    def load(self, folder: Path) -> None:
        """From a folder that exists."""
        ...

    def sample(self, request: SampleRequest, tokenizer: Any) -> tuple[list[int], list[float]]:
        """Drawn tokens, the stopping one included, and their log-probabilities."""
        ...

    def close(self) -> None: ...
