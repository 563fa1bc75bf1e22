"""Logits and labels in, one loss per label out: cross-entropy per token, and focal loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError
from rl_cluster.losses.base import CustomLoss, CustomLossConfig, expand_mask
from rl_cluster.losses.ratio_terms import same_shape


class TokenLevelLoss(CustomLoss):
    """Cross-entropy of each token, with a weight per token. ignore_index: labels that do not count."""

    def __init__(self, config: CustomLossConfig | None = None, ignore_index: int = -100) -> None:
        super().__init__(CustomLossConfig(name="token_level") if config is None else config)
        self.ignore_index = ignore_index

    def compute_loss(
        self,
        predictions: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor | None = None,
        per_token_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, L], 0 at ignored labels and where the mask is 0; predictions: logits [B, L, V], targets [B, L].

        predictions[:, t] are the logits of targets[:, t]: shift them before, if the labels are the inputs.
        per_token_weights: [B, L] or [B]. A mean is over the number of tokens that count, not their weights.
        """
        if targets.shape != predictions.shape[:-1]:
            raise BadInputError(
                f"TokenLevelLoss: predictions {tuple(predictions.shape)}, targets {tuple(targets.shape)}. "
                "Targets need one label for each row of logits."
            )
        if targets.numel() and bool((targets == self.ignore_index).all()):
            raise BadInputError(
                f"TokenLevelLoss: all {targets.numel()} labels are ignore_index={self.ignore_index}: "
                "nothing would be learnt. Check how the labels are made."
            )
        flat = predictions.reshape(-1, predictions.shape[-1])
        loss = F.cross_entropy(flat, targets.reshape(-1), ignore_index=self.ignore_index, reduction="none")
        loss = loss.reshape(targets.shape)
        if per_token_weights is not None:
            loss = loss * same_shape("TokenLevelLoss", loss, per_token_weights, "per_token_weights")
        return (
            loss if mask is None else torch.where(expand_mask(mask, loss, "TokenLevelLoss") != 0, loss, 0.0)
        )

    def kept(
        self, arguments: Mapping[str, Any], raw: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        counted = (arguments["targets"] != self.ignore_index).to(raw.dtype)
        return counted if mask is None else counted * expand_mask(mask, raw, self.config.name)


class FocalLoss(CustomLoss):
    """−α_t (1 − p_t)^γ log p_t of binary labels, Lin et al. 2017, equation 5: easy examples count less.

    alpha: weight of label 1, 1 − alpha that of label 0. gamma: 0 gives weighted cross-entropy.
    """

    def __init__(
        self, config: CustomLossConfig | None = None, alpha: float = 0.25, gamma: float = 2.0
    ) -> None:
        super().__init__(CustomLossConfig(name="focal") if config is None else config)
        check_number("FocalLoss.gamma", gamma, at_least=0.0)
        check_number("FocalLoss.alpha", alpha, at_least=0.0)
        if alpha > 1:
            raise BadInputError(f"FocalLoss.alpha={alpha}: must lie between 0 and 1.")
        self.alpha = alpha
        self.gamma = gamma

    def compute_loss(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """predictions: logits, any shape. targets: 0 or 1, the same shape. One loss per element."""
        if predictions.shape != targets.shape:
            raise BadInputError(
                f"FocalLoss: predictions {tuple(predictions.shape)}, targets {tuple(targets.shape)}: "
                "one label per logit is needed."
            )
        positive = targets.to(predictions.dtype)
        log_p = F.logsigmoid(torch.where(positive > 0.5, predictions, -predictions))
        alpha = self.alpha * positive + (1.0 - self.alpha) * (1.0 - positive)
        # 1 − p = exp(logsigmoid(−x)) keeps its digits where p is close to 1.
        log_rest = F.logsigmoid(torch.where(positive > 0.5, -predictions, predictions))
        return -alpha * (self.gamma * log_rest).exp() * log_p
