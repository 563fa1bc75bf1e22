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
from rl_cluster.modeling.policy import PolicyModel
from rl_cluster.protocols import OptimParams


@dataclass(frozen=True)
class StepOutcome:
    """grad_norm: L2 over all trained parameters, before clipping; inf or NaN when skipped."""

    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class StepSettings:
    """Everything that one update may choose. max_grad_norm: 0 for no clipping. gradient_scale: what the
    gradient is multiplied with before it is measured, clipped and applied. values_only: only the value head
    is updated; the rest, whose gradient must be 0, stays as it is to the bit, in its optimizer state, too."""

    learning_rate: float
    max_grad_norm: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    gradient_scale: float = 1.0
    values_only: bool = False

    @staticmethod
    def of(
        optimizer: OptimizerConfig, params: OptimParams, scheduled_rate: float, values_only: bool
    ) -> StepSettings:
        """What the step names, and the learner's own for the rest. Raises BadInputError."""

        def chosen(given: Any, own: Any) -> Any:
            return own if given is None else given

        params.check()
        return StepSettings(
            learning_rate=chosen(params.learning_rate, scheduled_rate),
            max_grad_norm=chosen(params.max_grad_norm, optimizer.max_grad_norm),
            betas=chosen(params.betas, optimizer.betas),
            eps=chosen(params.eps, optimizer.eps),
            weight_decay=chosen(params.weight_decay, optimizer.weight_decay),
            gradient_scale=params.gradient_scale,
            values_only=values_only,
        )


class Engine(Protocol):
    module: nn.Module
    """The model itself, without the engine's wrapper."""

    def forward(self, *inputs: Any) -> Any:
        """The model's forward; every rank must call it equally often."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss` to what is there, and to what the other ranks add."""
        ...

    def step(self, settings: StepSettings) -> StepOutcome:
        """Scale, clip, update, forget the gradient. One that is not finite changes nothing (skipped).
        Raises BadInputError, before anything changes, for settings that this engine cannot apply."""
        ...

    def forget(self) -> None:
        """Drop the gradient that was accumulated since the last step, be it nothing."""
        ...

    def gathered(self, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Inside, `parameter.data` is whole on every rank; buffers always are. Collective."""
        ...

    def shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Of the whole parameter; not collective."""
        ...

    def own_part(self, parameter: torch.Tensor) -> torch.Tensor:
        """What of its numbers this rank holds, perhaps none; not collective."""
        ...

    def state(self) -> dict[str, Any]:
        """This rank's part of master weights and moments: tensors and plain values only."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...


VALUES, HELD = "values", "held"
"""Marks of a parameter group: of a value head on the policy's trunk; left as it is by the next step."""


def parameter_groups(module: nn.Module, optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    """Trained parameters for AdamW, those of a policy's value head apart; with weight decay, vectors (biases,
    norms) do not decay."""
    trained = [p for p in module.parameters() if p.requires_grad]
    head = module.value_head if isinstance(module, PolicyModel) else None
    of_values = set() if head is None else {id(p) for p in head.parameters()}
    groups = []
    for values in (False, True):
        part = [p for p in trained if (id(p) in of_values) == values]
        mark = {VALUES: True} if values else {}
        if optimizer.weight_decay == 0:
            groups.append({"params": part, **mark})
            continue
        decaying, others = [p for p in part if p.dim() >= 2], [p for p in part if p.dim() < 2]
        groups.append({"params": decaying, "weight_decay": optimizer.weight_decay, **mark})
        groups.append({"params": others, "weight_decay": 0.0, **mark})
    return [group for group in groups if group["params"]]


def has_shared_values(module: nn.Module) -> bool:
    """Whether it is a policy whose trunk also carries a value head."""
    return isinstance(module, PolicyModel) and module.value_head is not None


def decaying(group: dict[str, Any]) -> bool | None:
    """Whether the parameters of a group of parameter_groups decay; None: vectors and matrices are mixed."""
    kinds = {parameter.dim() >= 2 for parameter in group["params"]}
    return kinds.pop() if len(kinds) == 1 else None


def apply_settings(
    groups: Sequence[dict[str, Any]], decays: Sequence[bool | None], settings: StepSettings
) -> None:
    """For the next step of an optimizer of build_adamw. decays: `decaying` of each group; one that is mixed
    does not decay here."""
    for group, decay in zip(groups, decays, strict=True):
        group["lr"], group["betas"], group["eps"] = settings.learning_rate, settings.betas, settings.eps
        group["weight_decay"] = settings.weight_decay if decay else 0.0
        group[HELD] = settings.values_only and not group.get(VALUES, False)


def _hold(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group.get(HELD, False):
            group["lr"] = 0.0


def _uncount(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A held group has made no step; counted, its young moments would later meet an old bias correction."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get(HELD, False) else ():
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                state["step"] -= 1


def build_adamw(groups: list[dict[str, Any]], optimizer: OptimizerConfig) -> torch.optim.AdamW:
    """PyTorch's fused AdamW; it exists for CPUs and for GPUs. Groups marked HELD stay as they are."""
    adamw = torch.optim.AdamW(
        groups,
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=0.0,
        fused=True,
    )
    adamw.register_step_pre_hook(_hold)
    adamw.register_step_post_hook(_uncount)
    return adamw
