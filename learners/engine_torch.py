"""Plain AdamW with float32 master weights, the model whole on every rank; yardstick of the other engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from learners.engine import (
    HELD,
    StepOutcome,
    StepSettings,
    apply_settings,
    build_adamw,
    decaying,
    parameter_groups,
)
from rl_cluster.config.run import OptimizerConfig

BUCKET_NUMBERS = 1 << 24
"""Gradients are summed over the ranks in buckets of about so many numbers."""

CLIP_EPSILON, CLIP_MARGIN = 1e-6, 1.001
"""What clip_grads_with_norm_ adds to the norm, and far more than float32's rounding of it."""


class TorchEngine:
    """One rank, or several that each hold everything and sum their gradients (what ZeRO calls stage 0)."""

    def __init__(self, module: nn.Module, optimizer: OptimizerConfig, world_size: int = 1) -> None:
        self.module = module
        self._world_size = world_size
        groups = parameter_groups(module, optimizer)
        self._decays = [decaying(group) for group in groups]
        self._pairs: list[tuple[nn.Parameter, torch.Tensor]] = []
        for group in groups:
            masters = [p if p.dtype == torch.float32 else p.detach().float() for p in group["params"]]
            self._pairs += zip(group["params"], masters, strict=True)
            group["params"] = masters
        self._optimizer = build_adamw(groups, optimizer)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for parameter, master in self._pairs:
            if parameter is not master and parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def step(self, settings: StepSettings) -> StepOutcome:
        masters, max_grad_norm = [master for _, master in self._pairs], settings.max_grad_norm
        self._sum_over_ranks(masters)
        gradients = [master.grad for master in masters if master.grad is not None]
        if settings.gradient_scale != 1.0:
            torch._foreach_mul_(gradients, settings.gradient_scale)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        skipped = not math.isfinite(norm)
        if not skipped:
            # Well below the limit clip_grads_with_norm_ would multiply by exactly 1.
            if 0 < max_grad_norm < CLIP_MARGIN * norm + CLIP_EPSILON:
                torch.nn.utils.clip_grads_with_norm_(masters, max_grad_norm, torch.tensor(norm))
            apply_settings(self._optimizer.param_groups, self._decays, settings)
            self._decay_mixed_groups(settings)
            self._optimizer.step()
            self._copy_masters()
        self.forget()
        return StepOutcome(norm, skipped)

    def forget(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def gathered(self, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        del parameters
        return nullcontext()

    def shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def own_part(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach()

    def state(self) -> dict[str, Any]:
        return {
            "masters": [master.detach() for _, master in self._pairs],
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for (_, master), saved in zip(self._pairs, state["masters"], strict=True):
                master.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self._optimizer.zero_grad(set_to_none=True)
        self._copy_masters()

    def _decay_mixed_groups(self, settings: StepSettings) -> None:
        """AdamW's decay of the matrices in groups that also hold vectors, for a decay named by one step."""
        factor = 1.0 - settings.learning_rate * settings.weight_decay
        for group, decays in zip(self._optimizer.param_groups, self._decays, strict=True):
            if factor != 1.0 and decays is None and not group.get(HELD, False):
                with torch.no_grad():
                    torch._foreach_mul_([p for p in group["params"] if p.dim() >= 2], factor)

    def _copy_masters(self) -> None:
        with torch.no_grad():
            for parameter, master in self._pairs:
                if parameter is not master:
                    parameter.copy_(master)

    def _sum_over_ranks(self, masters: list[torch.Tensor]) -> None:
        for master in masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        if self._world_size == 1:
            return
        bucket: list[torch.Tensor] = []
        for index, master in enumerate(masters):
            assert master.grad is not None
            bucket.append(master.grad)
            if sum(g.numel() for g in bucket) >= BUCKET_NUMBERS or index == len(masters) - 1:
                flat = torch.cat([g.flatten() for g in bucket])
                dist.all_reduce(flat)
                for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(part.view_as(gradient))
                bucket = []
