"""What the pipeline's futures hold, and what a loss function of the user's may return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class ForwardBackwardOutput:
    """Legend: B rows, L positions, V vocabulary; all tensors are detached.

    loss: of this call alone, its mean over its trained tokens (a callable's own scalar).
    logits: [B, L, V] as the model returned them; None on a cluster, where they never exist at once.
    logprobs: float [B, L], entry t the log-probability (nats) of the label at t given the tokens before it;
    0 where there is no label, at padding and at position 0.
    metrics: floats, among them loss, num_tokens, accumulated_steps (calls since the last optimizer step) and
    execution_time (seconds, without waiting in the queue).
    gradients: parameter name -> gradient of `loss` alone, where `return_gradients=True` asked for it.
    """

    loss: float
    logits: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class OptimStepOutput:
    """step: optimizer steps taken so far, this one included. learning_rate: that of this step (first group).
    grad_norm: L2 of the accumulated gradient before clipping, 0 when there was none.
    metrics: `skipped` is 1.0 when nothing was changed; `accumulated_steps` calls made up the gradient;
    `next_learning_rate` after the scheduler.
    """

    step: int
    learning_rate: float
    grad_norm: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightedLoss:
    """What a callable loss may return to accumulate as exactly as the built-in ones.

    loss: scalar tensor, a mean over `weight` tokens (or rows, or pairs). weight: that number, positive; a
    bare scalar weighs as many tokens as have labels. Calls combine as Σ weight · loss / Σ weight.
    """

    loss: torch.Tensor
    weight: float
    metrics: dict[str, Any] = field(default_factory=dict)
