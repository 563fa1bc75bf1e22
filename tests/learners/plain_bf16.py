"""Training in bfloat16 with float32 masters, written out: what an engine must do, without an engine.

Each row is a backward pass of its own in bfloat16; the passes' gradients are added up in float32, clipped
together, and AdamW moves float32 masters, which are then rounded into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from learners.schedule import learning_rate
from rl_cluster.batch import TokenBatch
from rl_cluster.config.run import OptimizerConfig


class PlainMasters:
    """backward adds a gradient, step moves the masters and rounds them into the module."""

    def __init__(self, module: nn.Module, optimizer: OptimizerConfig) -> None:
        self.parameters = list(module.parameters())
        self.masters = [p.detach().clone().float() for p in self.parameters]
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        matrices, vectors = ([m for m in self.masters if (m.dim() > 1) == wanted] for wanted in (True, False))
        groups = [
            {"params": matrices, "weight_decay": optimizer.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            groups, betas=optimizer.betas, eps=optimizer.eps, foreach=False, fused=False
        )

    def backward(self, loss: torch.Tensor) -> None:
        for total, gradient in zip(self.gradients, torch.autograd.grad(loss, self.parameters), strict=True):
            total += gradient.float()

    def step(self, rate: float, max_grad_norm: float) -> float:
        norm = float(torch.sqrt(sum((g.double() ** 2).sum() for g in self.gradients)))  # type: ignore[arg-type]
        factor = min(1.0, max_grad_norm / norm) if max_grad_norm > 0 else 1.0
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient * factor
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master.to(parameter.dtype))
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        return norm


def imitate(
    model_path: str, batches: Sequence[TokenBatch], optimizer: OptimizerConfig, total_steps: int
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Cross-entropy over the drawn tokens, an update per batch; the model's weights and the norms."""
    lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    plain = PlainMasters(lm, optimizer)
    norms = []
    for number, batch in enumerate(batches):
        for loss in row_losses(lm, batch):
            plain.backward(loss)
        norms.append(plain.step(learning_rate(optimizer, number, total_steps), optimizer.max_grad_norm))
    return {name: p.detach().float().numpy() for name, p in lm.named_parameters()}, norms


def row_losses(lm: Callable[..., object], batch: TokenBatch) -> Iterable[torch.Tensor]:
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        drawn = torch.from_numpy(batch.action_mask[start:end])
        labels = tokens.masked_fill(~drawn, -100)
        logits = lm(tokens[None]).logits[0].float()  # type: ignore[attr-defined]
        loss = nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        yield loss / int(batch.action_counts.sum())
