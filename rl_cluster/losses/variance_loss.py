"""A batch of model outputs in, a penalty on outputs that vary too little or too much over the batch out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError
from rl_cluster.losses.base import (
    REDUCTIONS,
    CustomLoss,
    CustomLossConfig,
    Reduction,
    expand_mask,
    masked_mean,
    reduce_loss,
)


class VarianceLoss(CustomLoss):
    """mean((variance over the batch − target_variance)²) − beta · entropy of softmax(predictions).

    The entropy, in nats over the last dimension and averaged over what counts, is there where predictions
    have two or more dimensions. compute_loss gives the scalar. Called, the config's reduction acts on the
    outputs' parts of it ([..., F], each with the whole entropy term): "mean" is the scalar.
    """

    def __init__(
        self, config: CustomLossConfig | None = None, target_variance: float = 1.0, beta: float = 0.1
    ) -> None:
        super().__init__(CustomLossConfig(name="variance") if config is None else config)
        check_number("VarianceLoss.target_variance", target_variance, at_least=0.0)
        check_number("VarianceLoss.beta", beta)
        self.target_variance = target_variance
        self.beta = beta

    def compute_loss(
        self,
        predictions: torch.Tensor,
        targets: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """predictions: [B] or [B, ..., F], logits. mask: [B] or more leading dimensions. targets: not used;
        they are there so that the loss can stand in a CompositeLoss.

        The variance is unbiased (n − 1); entries that fewer than two rows have are left out.
        """
        return masked_mean(*self._per_output(predictions, mask))

    def elements(
        self, arguments: Mapping[str, Any], mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[..., F]: the parts of the outputs, and where two rows or more count."""
        parts, enough = self._per_output(self.temper(dict(arguments))["predictions"], mask)
        return (parts, enough) if parts.dim() else (parts, None)

    def kept(
        self, arguments: Mapping[str, Any], raw: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The mask is over rows, and the loss over outputs."""
        return None

    def _per_output(
        self, predictions: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.ones_like(predictions) if mask is None else mask
        kept = expand_mask(whole, predictions, "VarianceLoss")
        variance, enough = batch_variance(predictions, kept != 0)
        parts = (variance - self.target_variance).square()
        if predictions.dim() >= 2 and self.beta != 0:
            log_p = torch.log_softmax(predictions, dim=-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            parts = parts - self.beta * masked_mean(entropy, kept[..., 0], self.config.epsilon)
        return parts, enough.to(predictions.dtype)


def batch_variance(values: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unbiased variance over the first dimension of the kept entries, and where there were two or more."""
    count = kept.sum(0)
    enough = count >= 2
    if not enough.any():
        raise BadInputError(
            f"VarianceLoss: of predictions {tuple(values.shape)} at most {int(count.max())} row(s) count. "
            "A variance needs at least two rows."
        )
    mean = torch.where(kept, values, 0.0).sum(0) / count.clamp(min=1)
    squares = torch.where(kept, (values - mean).square(), 0.0).sum(0)
    return squares / (count - 1).clamp(min=1), enough


def variance_regularization(
    outputs: torch.Tensor, target_std: float = 1.0, reduction: Reduction = "mean"
) -> torch.Tensor:
    """(standard deviation over the batch − target_std)² of each output; outputs: [B, ...], B at least 2."""
    if reduction not in REDUCTIONS:
        raise BadInputError(
            f"variance_regularization.reduction={reduction!r}: one of {', '.join(REDUCTIONS)}."
        )
    check_number("variance_regularization.target_std", target_std, at_least=0.0)
    variance, _ = batch_variance(outputs, torch.ones_like(outputs, dtype=torch.bool))
    # The slope of a square root at 0 is infinite: outputs that are all equal get none.
    deviation = torch.where(variance > 0, variance.clamp(min=1e-30).sqrt(), 0.0)
    return reduce_loss((deviation - target_std).square(), None, reduction)
