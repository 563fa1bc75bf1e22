"""What some models do to the logits of their linear head before the softmax: a factor and a soft cap.

Enters: a model's config, then logits. Leaves: the logits that the model's distribution is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

FACTORS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Under which of these names transformers' configs hold it: Cohere and Falcon-H1; Granite; Gemma 2 and its
kin, RecurrentGemma, xLSTM."""


@dataclass(frozen=True)
class LogitMap:
    """z → cap · tanh(factor · z / cap); without a cap z → factor · z."""

    factor: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(config: Any) -> LogitMap:
        """As the model's config says; whether the model does so is examined when it is loaded."""
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        factor = 1.0
        for name in FACTORS:
            factor *= _number(text, name) or 1.0
        for name in DIVISORS:
            factor /= _number(text, name) or 1.0
        caps = [cap for cap in (_number(text, name) for name in CAPS) if cap]
        return LogitMap(factor, caps[0] if caps else None)

    def apply(self, raw: torch.Tensor) -> torch.Tensor:
        """The same shape; works in place on `raw` where it can. raw: of a working precision, no bfloat16."""
        if self.factor != 1.0:
            raw = raw * self.factor if raw.requires_grad else raw.mul_(self.factor)
        if self.cap is not None:
            raw = torch.tanh(raw / self.cap) * self.cap
        return raw

    def pull_back(self, gradient: torch.Tensor, mapped: torch.Tensor) -> torch.Tensor:
        """∂/∂raw from ∂/∂mapped: d tanh(x) = 1 − tanh²(x). mapped: what `apply` gave, used under a cap."""
        if self.cap is not None:
            gradient = gradient * (1.0 - (mapped / self.cap).square())
        return gradient if self.factor == 1.0 else gradient * self.factor


IDENTITY = LogitMap()


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
