"""Token ids of texts in; a reward per objective and their weighted sum out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import ModelOutput

from rl_cluster.checks import check_number, check_whole_number
from rl_cluster.errors import BadInputError
from rl_cluster.reward_models.config import RewardModelConfig
from rl_cluster.reward_models.reward_model import RewardModel, check_pairs


@dataclass
class MultiObjectiveOutput(ModelOutput):
    """rewards [B, n]; combined_reward [B, 1]; pooled_output [B, H]; last_hidden_state [B, L, H]."""

    rewards: torch.Tensor | None = None
    combined_reward: torch.Tensor | None = None
    pooled_output: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None


class MultiObjectiveRewardModel(RewardModel):
    """One reward per objective; combined_reward = Σ weight · reward, with the weights exactly as given.

    objective_weights: num_objectives numbers, not normalised, negative ones allowed (a cost); None: 1 / n
    each. They act on what is combined, not on compute_multi_objective_loss.
    config.num_labels must be 1 (its default) or num_objectives. The head has a bias, for absolute targets.
    """

    head_bias = True

    def __init__(
        self,
        config: RewardModelConfig,
        num_objectives: int = 3,
        objective_weights: Sequence[float] | None = None,
        base_model: Any = None,
    ) -> None:
        check_whole_number("num_objectives", num_objectives)
        weights = _weights(num_objectives, objective_weights)
        if isinstance(config, RewardModelConfig):
            if config.num_labels not in (1, num_objectives):
                raise BadInputError(
                    f"RewardModelConfig.num_labels={config.num_labels}: contradicts num_objectives="
                    f"{num_objectives}; leave it at 1 or set them alike."
                )
            config = replace(config, num_labels=num_objectives)
        super().__init__(config, base_model)
        self.num_objectives = num_objectives
        self.register_buffer(
            "objective_weights", torch.tensor(weights, device=self.reward_head[-1].weight.device)
        )

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        return_all_objectives: bool = True,
        return_dict: bool = True,
    ) -> MultiObjectiveOutput | torch.Tensor:
        """MultiObjectiveOutput; without return_all_objectives its rewards are the combined ones, [B, 1].

        return_dict=False: those rewards alone, a tensor.
        """
        hidden, pooled = self.pooled(input_ids, attention_mask)
        rewards = self.rewards_of(pooled)
        combined = self.combined(rewards)
        shown = rewards if return_all_objectives else combined
        return MultiObjectiveOutput(shown, combined, pooled, hidden) if return_dict else shown

    def combined(self, rewards: torch.Tensor) -> torch.Tensor:
        """[B, 1] = Σ weight · reward. rewards: [B, n]."""
        weights = self.objective_weights.to(device=rewards.device, dtype=rewards.dtype)
        return (rewards * weights).sum(dim=1, keepdim=True)

    def arguments(self) -> dict[str, Any]:
        return {
            "num_objectives": self.num_objectives,
            "objective_weights": self.objective_weights.tolist(),
        }

    def preference_logits(
        self,
        first_input_ids: torch.Tensor,
        first_attention_mask: torch.Tensor | None,
        second_input_ids: torch.Tensor,
        second_attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """[B, 1]: the difference of the combined rewards."""
        check_pairs(first_input_ids, second_input_ids)
        first = self(first_input_ids, first_attention_mask, return_dict=False)
        second = self(second_input_ids, second_attention_mask, return_dict=False)
        return self.combined(first) - self.combined(second)

    def compute_multi_objective_loss(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        target_rewards: torch.Tensor,
        objective_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean squared error over the entries kept, a scalar; the same per objective, [n]).

        target_rewards: [B, n]. objective_mask: [B, n] or [n], 1 for entries that train; None: all. What it
        excludes is in no mean (its target may be NaN); an objective without entries is NaN.
        Raises BadInputError for wrong shapes, targets kept that are not finite, and a mask that keeps none.
        """
        rewards = self(input_ids, attention_mask, return_dict=False)
        return multi_objective_loss(rewards, target_rewards, objective_mask)


def multi_objective_loss(
    rewards: torch.Tensor, target_rewards: Any, objective_mask: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As compute_multi_objective_loss, of rewards [B, n]."""
    targets = torch.as_tensor(target_rewards, device=rewards.device).to(rewards.dtype)
    if targets.shape != rewards.shape:
        raise BadInputError(
            f"target_rewards: {tuple(targets.shape)} for rewards {tuple(rewards.shape)}; give one target per "
            "text and objective."
        )
    kept = _kept(objective_mask, rewards)
    if not bool(torch.isfinite(targets[kept]).all()):
        raise BadInputError(
            "target_rewards: holds NaN or infinity; give finite targets, or leave entries out by "
            "objective_mask."
        )
    # where before the square: an excluded NaN would reach the gradient through a product with 0.
    squares = torch.where(kept, rewards - torch.where(kept, targets, rewards.detach()), 0.0) ** 2
    sums, counts = squares.sum(dim=0), kept.sum(dim=0)
    per_objective = torch.where(counts > 0, sums / counts.clamp(min=1), torch.nan)
    return sums.sum() / counts.sum(), per_objective


def _kept(objective_mask: Any, rewards: torch.Tensor) -> torch.Tensor:
    if objective_mask is None:
        return torch.ones_like(rewards, dtype=torch.bool)
    mask = torch.as_tensor(objective_mask, device=rewards.device)
    if mask.shape not in (rewards.shape, rewards.shape[1:]):
        raise BadInputError(
            f"objective_mask: {tuple(mask.shape)} for rewards {tuple(rewards.shape)}; give that shape, or "
            "one entry per objective."
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise BadInputError("objective_mask: holds values other than 0 and 1; 1 marks entries that train.")
    if not bool((mask == 1).any()):
        raise BadInputError("objective_mask: keeps nothing; set at least one entry to 1.")
    return (mask == 1).expand_as(rewards)


def _weights(num_objectives: int, given: Any) -> list[float]:
    if given is None:
        return [1.0 / num_objectives] * num_objectives
    weights = given.tolist() if isinstance(given, torch.Tensor) else given
    if not isinstance(weights, Sequence) or isinstance(weights, str) or len(weights) != num_objectives:
        raise BadInputError(
            f"objective_weights={given!r:.60}: give {num_objectives} numbers, one per objective."
        )
    for index, weight in enumerate(weights):
        check_number(f"objective_weights[{index}]", weight)
    return [float(weight) for weight in weights]
