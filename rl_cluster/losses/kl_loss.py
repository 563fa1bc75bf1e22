"""What two policies think of the same tokens in, a penalty on KL(policy ‖ reference) out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_cluster.algorithms.kl import kl_per_token
from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError
from rl_cluster.losses.base import CustomLoss, CustomLossConfig, expand_mask, masked_mean
from rl_cluster.losses.ratio_terms import same_shape, temper_log_ratio


class KLDivergenceLoss(CustomLoss):
    """kl_coef · max(0, KL(policy ‖ reference) − target_kl): no penalty below the target.

    compute_loss gives the scalar. Called, the config's reduction acts on the tokens' parts of it: "mean" is
    the scalar, "sum" the scalar times the number of tokens, "none" a part per token.
    """

    def __init__(
        self, config: CustomLossConfig | None = None, target_kl: float = 0.01, kl_coef: float = 0.1
    ) -> None:
        super().__init__(CustomLossConfig(name="kl_divergence") if config is None else config)
        check_number("KLDivergenceLoss.target_kl", target_kl, at_least=0.0)
        check_number("KLDivergenceLoss.kl_coef", kl_coef, at_least=0.0)
        self.target_kl = target_kl
        self.kl_coef = kl_coef

    def compute_loss(
        self, log_probs: torch.Tensor, ref_log_probs: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """log_probs, ref_log_probs: [B, L], of tokens that the policy drew. Scalar.

        The value is the mean of log π − log π_ref, the plain estimate of the divergence. Its own gradient is
        0 on average; the gradient is therefore that of ½ (log π − log π_ref)², which is the divergence's
        on average (k1 and k2 of http://joschu.net/blog/kl-approx.html).
        """
        each, kept = self._per_token(log_probs, ref_log_probs, mask)
        return self.kl_coef * torch.relu(masked_mean(each, kept, self.config.epsilon) - self.target_kl)

    def elements(
        self, arguments: Mapping[str, Any], mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """kl_coef · (divergence of the token − target_kl), [B, L], all 0 where the mean is below the target:
        the mean of the elements is compute_loss's scalar."""
        tempered = self.temper(dict(arguments))
        each, kept = self._per_token(tempered["log_probs"], tempered["ref_log_probs"], mask)
        above = masked_mean(each.detach(), kept, self.config.epsilon) > self.target_kl
        return self.kl_coef * torch.where(above, each - self.target_kl, 0.0 * each), kept

    def _per_token(
        self, log_probs: torch.Tensor, ref_log_probs: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The value of k1 with the gradient of k2, and the mask, both [B, L]."""
        reference = same_shape("KLDivergenceLoss", log_probs, ref_log_probs, "ref_log_probs").detach()
        kept = None if mask is None else expand_mask(mask, log_probs, "KLDivergenceLoss")
        value = kl_per_token(log_probs, reference, "k1").detach()
        slope = kl_per_token(log_probs, reference, "k2")
        return value + slope - slope.detach(), kept

    def temper(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return temper_log_ratio(arguments, "ref_log_probs", self.config.temperature)


def compute_kl_penalty(
    logits: torch.Tensor,
    ref_logits: torch.Tensor,
    mask: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Exact KL(policy ‖ reference) in nats, averaged over what the mask keeps.

    logits, ref_logits: [..., V]; mask: [...]. Σ_v π(v) (log π(v) − log π_ref(v)), both at the temperature.
    """
    check_number("compute_kl_penalty.temperature", temperature, above=0.0)
    if logits.shape != ref_logits.shape:
        raise BadInputError(
            f"compute_kl_penalty: logits {tuple(logits.shape)}, ref_logits {tuple(ref_logits.shape)}: "
            "both must be [..., vocabulary] of the same tokens."
        )
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    log_q = torch.log_softmax(ref_logits.detach() / temperature, dim=-1)
    # A token that the policy excludes (-inf) adds 0, though its log-ratio is -inf or NaN.
    each = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0).sum(-1)
    return masked_mean(each, None if mask is None else expand_mask(mask, each, "compute_kl_penalty"))
