"""Log-probabilities, advantages and values of drawn tokens in, the clipped objective of PPO out."""

from __future__ import annotations

from typing import Any

import torch

from rl_cluster.algorithms.kl import safe_logprobs
from rl_cluster.algorithms.losses import clip_loss, clipped_value_loss
from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError
from rl_cluster.losses.base import CustomLoss, CustomLossConfig, expand_mask, masked_mean
from rl_cluster.losses.ratio_terms import importance_ratio, same_shape, temper_log_ratio


class PPOLoss(CustomLoss):
    """Clipped surrogate + value_loss_coef · value loss − entropy_coef · entropy, per token.

    Schulman et al. 2017, equations 7 and 9. value_clip: how far values may move from old_values; None does
    not clip them. Arguments of compute_loss, each [B, L] (advantages also [B]): see there.
    """

    def __init__(
        self,
        config: CustomLossConfig | None = None,
        clip_param: float = 0.2,
        value_clip: float | None = None,
        entropy_coef: float = 0.01,
        value_loss_coef: float = 0.5,
    ) -> None:
        super().__init__(CustomLossConfig(name="ppo") if config is None else config)
        check_number("PPOLoss.clip_param", clip_param, above=0.0)
        check_number("PPOLoss.entropy_coef", entropy_coef)
        check_number("PPOLoss.value_loss_coef", value_loss_coef, at_least=0.0)
        if value_clip is not None:
            check_number("PPOLoss.value_clip", value_clip, above=0.0)
        self.clip_param = clip_param
        self.value_clip = value_clip
        self.entropy_coef = entropy_coef
        self.value_loss_coef = value_loss_coef

    def compute_loss(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        values: torch.Tensor | None = None,
        old_values: torch.Tensor | None = None,
        returns: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        entropy: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, L], 0 where the mask is 0. Log-probabilities are those of the drawn tokens.

        values and returns go together; old_values are needed with value_clip. entropy: of the policy at each
        token; without it the entropy is estimated from the drawn tokens (see sampled_entropy).
        """
        old_log_probs = same_shape("PPOLoss", log_probs, old_log_probs, "old_log_probs")
        advantages = same_shape("PPOLoss", log_probs, advantages, "advantages").detach()
        ratio = importance_ratio(log_probs, old_log_probs)
        loss = clip_loss(ratio, advantages, self.clip_param, self.clip_param).loss
        if self.entropy_coef != 0:
            bonus = sampled_entropy(log_probs) if entropy is None else entropy
            loss = loss - self.entropy_coef * same_shape("PPOLoss", log_probs, bonus, "entropy")
        if values is not None or returns is not None:
            loss = loss + self.value_loss_coef * self._value_loss(log_probs, values, old_values, returns)
        return loss if mask is None else torch.where(expand_mask(mask, loss, "PPOLoss") != 0, loss, 0.0)

    def temper(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return temper_log_ratio(arguments, "old_log_probs", self.config.temperature)

    def _value_loss(
        self,
        log_probs: torch.Tensor,
        values: torch.Tensor | None,
        old_values: torch.Tensor | None,
        returns: torch.Tensor | None,
    ) -> torch.Tensor:
        if values is None or returns is None:
            missing = "values" if values is None else "returns"
            raise BadInputError(f"PPOLoss: {missing} missing. The value loss needs both values and returns.")
        values = same_shape("PPOLoss", log_probs, values, "values")
        returns = same_shape("PPOLoss", log_probs, returns, "returns").detach()
        if self.value_clip is None:
            return 0.5 * (values - returns).square()
        if old_values is None:
            raise BadInputError(
                f"PPOLoss.value_clip={self.value_clip}: needs old_values, the values from before the update. "
                "Pass them, or set value_clip=None."
            )
        old_values = same_shape("PPOLoss", log_probs, old_values, "old_values").detach()
        return clipped_value_loss(values, old_values, returns, self.value_clip).loss


def sampled_entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """−log π of each drawn token, an unbiased estimate of the entropy, with a gradient that is unbiased too.

    −log π alone would not do: its gradient is 0 on average (E[∇ log π] = 0), whereas that of the entropy is
    −E[log π ∇ log π]. So the value is −log π and the gradient −log π · ∇ log π.
    """
    log_prob = safe_logprobs(log_probs)
    fixed = log_prob.detach()
    return -fixed * (1.0 + log_prob - fixed)


def compute_ppo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    clip_param: float = 0.2,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The clipped surrogate alone, averaged over what the mask keeps, and its metrics.

    All [B, L]. metrics: ppo_loss, clip_fraction (the share of ratios outside 1 ± clip_param), mean_ratio.
    """
    check_number("compute_ppo_loss.clip_param", clip_param, above=0.0)
    old_log_probs = same_shape("compute_ppo_loss", log_probs, old_log_probs, "old_log_probs")
    advantages = same_shape("compute_ppo_loss", log_probs, advantages, "advantages").detach()
    ratio = importance_ratio(log_probs, old_log_probs)
    each = clip_loss(ratio, advantages, clip_param, clip_param).loss
    kept = None if mask is None else expand_mask(mask, each, "compute_ppo_loss")
    loss = masked_mean(each, kept)
    outside = ((ratio.detach() - 1.0).abs() > clip_param).to(each.dtype)
    metrics = {
        "ppo_loss": loss.item(),
        "clip_fraction": masked_mean(outside, kept).item(),
        "mean_ratio": masked_mean(ratio.detach(), kept).item(),
    }
    return loss, metrics
