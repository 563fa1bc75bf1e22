"""Log-probabilities and advantages of tokens that another policy drew in, the corrected objective out."""

from __future__ import annotations

import math
from typing import Any

import torch

from rl_cluster.checks import check_number
from rl_cluster.losses.base import CustomLoss, CustomLossConfig, expand_mask, masked_mean
from rl_cluster.losses.ratio_terms import importance_ratio, same_shape, temper_log_ratio


class ImportanceSamplingLoss(CustomLoss):
    """−min(π / π_old, clip_ratio) · A per token; a truncated token keeps its gradient.

    Truncation: Espeholt et al. 2018. normalize: the ratios are divided by their mean over the tokens that
    the mask keeps (self-normalised importance sampling), which takes out the effect of a constant advantage.
    """

    def __init__(
        self, config: CustomLossConfig | None = None, clip_ratio: float = 10.0, normalize: bool = True
    ) -> None:
        super().__init__(CustomLossConfig(name="importance_sampling") if config is None else config)
        check_number("ImportanceSamplingLoss.clip_ratio", clip_ratio, above=0.0)
        self.clip_ratio = clip_ratio
        self.normalize = normalize

    def compute_loss(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, L], 0 where the mask is 0; each argument [B, L], advantages also [B]."""
        old_log_probs = same_shape("ImportanceSamplingLoss", log_probs, old_log_probs, "old_log_probs")
        advantages = same_shape("ImportanceSamplingLoss", log_probs, advantages, "advantages").detach()
        ratio = importance_ratio(log_probs, old_log_probs, max_log_ratio=math.log(self.clip_ratio))
        kept = None if mask is None else expand_mask(mask, ratio, "ImportanceSamplingLoss")
        if self.normalize:
            ratio = ratio / masked_mean(ratio, kept, self.config.epsilon).clamp(min=self.config.epsilon)
        loss = -ratio * advantages
        return loss if kept is None else torch.where(kept != 0, loss, 0.0)

    def temper(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return temper_log_ratio(arguments, "old_log_probs", self.config.temperature)
