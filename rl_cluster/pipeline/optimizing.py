"""Around an optimizer's step: is it the right one, how long is the gradient, clip it without touching it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_cluster.errors import BadInputError


def check_torch_optimizer(optimizer: Any, scheduler: Any, module: nn.Module) -> None:
    """Raise BadInputError for what cannot step this module."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInputError(
            f"optimizer: {type(optimizer).__name__} is none; give a torch.optim.Optimizer over "
            "model.parameters()"
        )
    own = {id(p) for p in module.parameters()}
    if not any(id(p) in own for p in owned_parameters(optimizer)):
        raise BadInputError(
            "optimizer: it holds none of the model's parameters; build it from this model's parameters()"
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise BadInputError(
            f"scheduler: {type(scheduler).__name__} has no step(); give a learning-rate scheduler"
        )
    bound = getattr(scheduler, "optimizer", optimizer)
    if bound is not optimizer:
        raise BadInputError(
            "scheduler: it belongs to another optimizer; build it from the one that is passed"
        )


def owned_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradient_norm(optimizer: torch.optim.Optimizer) -> float:
    """L2 over what this optimizer will apply."""
    gradients = [p.grad for p in owned_parameters(optimizer) if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def clip_into_copies(optimizer: torch.optim.Optimizer, norm: float, max_norm: float) -> None:
    """Give the optimizer gradients of its own, scaled to max_norm where they are longer (0: never).

    Copies, because some optimizers write into gradients and a failed step must leave them as they were.
    """
    factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
    for parameter in owned_parameters(optimizer):
        if parameter.grad is not None:
            parameter.grad = parameter.grad * factor
