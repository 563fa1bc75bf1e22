"""Token ids of texts in; a reward per objective and their weighted sum out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import ModelOutput

from rl_cluster.checks import check_whole_number
from rl_cluster.errors import BadInputError
from rl_cluster.reward_models.config import RewardModelConfig
from rl_cluster.reward_models.objective_losses import ObjectiveLosses
from rl_cluster.reward_models.objective_losses import multi_objective_loss as multi_objective_loss
from rl_cluster.reward_models.objective_weights import ObjectiveWeights, check_weights
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
        weights = check_weights(num_objectives, objective_weights)
        if isinstance(config, RewardModelConfig):
            if config.num_labels not in (1, num_objectives):
                raise BadInputError(
                    f"RewardModelConfig.num_labels={config.num_labels}: contradicts num_objectives="
                    f"{num_objectives}; leave it at 1 or set them alike."
                )
            config = replace(config, num_labels=num_objectives)
        super().__init__(config, base_model)
        self.num_objectives = num_objectives
        self._given_weights = weights
        # Not register_buffer: the property of that name, which gives them as written, is in its way.
        device = self.reward_head[-1].weight.device
        self._buffers["objective_weights"] = torch.tensor(list(weights), device=device)

    @property
    def objective_weights(self) -> ObjectiveWeights:
        """As they were given, or as a loaded state has them."""
        now, given = self._weights(), self._given_weights
        if torch.equal(torch.tensor(list(given)).to(now), now):
            return given
        return ObjectiveWeights(now.tolist())

    def _weights(self) -> torch.Tensor:
        weights = self._buffers["objective_weights"]
        assert weights is not None
        return weights

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
        weights = self._weights().to(device=rewards.device, dtype=rewards.dtype)
        return (rewards * weights).sum(dim=1, keepdim=True)

    def combine_objectives(self, rewards: torch.Tensor) -> torch.Tensor:
        """As `combined`: [B, 1] of rewards [B, n], or [1] of one text's [n]; BadInputError for others."""
        if not isinstance(rewards, torch.Tensor) or rewards.shape[-1:] != (self.num_objectives,):
            found = tuple(rewards.shape) if isinstance(rewards, torch.Tensor) else type(rewards).__name__
            raise BadInputError(
                f"rewards: {found}; give a tensor [batch, {self.num_objectives}], a reward per objective."
            )
        return self.combined(rewards) if rewards.dim() > 1 else self.combined(rewards[None])[0]

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
    ) -> tuple[torch.Tensor, ObjectiveLosses]:
        """(mean squared error over the entries kept, a scalar; {"objective_0": the same of the first, …}).

        target_rewards: [B, n]. objective_mask: [B, n] or [n], 1 for entries that train; None: all. What it
        excludes is in no mean (its target may be NaN); an objective without entries is NaN. The dict may be
        used as the tensor [n] of its values, too.
        Raises BadInputError for wrong shapes, targets kept that are not finite, and a mask that keeps none.
        """
        rewards = self(input_ids, attention_mask, return_dict=False)
        return multi_objective_loss(rewards, target_rewards, objective_mask)
