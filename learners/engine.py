"""What a rank needs of an optimizer engine; engine_torch.py and engine_deepspeed.py fulfil it.

Gradients are plain sums: over backward passes and over ranks, whatever the engine does inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from rl_cluster.config.run import OptimizerConfig


@dataclass(frozen=True)
class StepOutcome:
    """grad_norm: L2 over all trained parameters, before clipping; inf or NaN when skipped."""

    grad_norm: float
    skipped: bool


class Engine(Protocol):
    module: nn.Module
    """The model itself, without the engine's wrapper."""

    def forward(self, *inputs: Any) -> Any:
        """The model's forward; every rank must call it equally often."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss` to what is there, and to what the other ranks add."""
        ...

    def step(self, learning_rate: float, max_grad_norm: float) -> StepOutcome:
        """Clip to max_grad_norm (0: no clipping), update, forget the gradient.

        A gradient that is not finite changes nothing (skipped)."""
        ...

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Inside, `parameter.data` is whole on every rank. Collective."""
        ...

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Of the whole parameter; not collective."""
        ...

    def state(self) -> dict[str, Any]:
        """This rank's part of master weights and moments: tensors and plain values only."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...


def parameter_groups(module: nn.Module, optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    """Trained parameters for AdamW; with weight decay, vectors (biases, norms) do not decay."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if optimizer.weight_decay == 0:
        return [{"params": trained}]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_adamw(groups: list[dict[str, Any]], optimizer: OptimizerConfig) -> torch.optim.AdamW:
    """PyTorch's fused AdamW; it exists for CPUs and for GPUs."""
    return torch.optim.AdamW(
        groups,
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=0.0,
        fused=True,
    )
