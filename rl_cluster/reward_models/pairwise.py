"""Two texts in, the log-odds that the first is the better one out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_cluster.algorithms.preference import bradley_terry_loss
from rl_cluster.errors import BadInputError
from rl_cluster.reward_models.config import RewardModelConfig
from rl_cluster.reward_models.reward_model import RewardModel, check_pairs, seeded


class PairwiseRewardModel(RewardModel):
    """Compares texts with each other: f(a, b) = r(a) − r(b) + (c(a, b) − c(b, a)) / temperature.

    r is the reward of each text alone, c the comparison head on both pooled states. f(b, a) = −f(a, b) by
    construction, so σ(f) is a probability that does not depend on the order. The comparison may be
    intransitive, which no reward can be; `predict_rewards` gives r, the part that is a reward.
    """

    def __init__(self, config: RewardModelConfig, base_model: Any = None) -> None:
        super().__init__(config, base_model)
        if config.num_labels != 1:
            raise BadInputError(
                f"RewardModelConfig.num_labels={config.num_labels}: a PairwiseRewardModel gives one number "
                "per pair; set it to 1."
            )
        size = self.hidden_size
        with seeded(config.seed + 1):
            self.comparison_head = nn.Sequential(
                nn.Linear(2 * size, size), nn.Tanh(), nn.Dropout(config.dropout_prob), nn.Linear(size, 1)
            )
        self._place_heads()

    def forward_pair(
        self,
        input_ids_a: torch.Tensor,
        attention_mask_a: torch.Tensor | None,
        input_ids_b: torch.Tensor,
        attention_mask_b: torch.Tensor | None,
    ) -> torch.Tensor:
        """[B, 1]: above 0 where a is preferred. a and b: [B, La] and [B, Lb], padded on either side.

        In training mode dropout makes f(a, b) and f(b, a) differ by its noise.
        """
        check_pairs(input_ids_a, input_ids_b)
        a = self.pooled(input_ids_a, attention_mask_a)[1]
        b = self.pooled(input_ids_b, attention_mask_b)[1]
        return self.rewards_of(a) - self.rewards_of(b) + self._comparison(a, b) / self.config.temperature

    def preference_logits(
        self,
        first_input_ids: torch.Tensor,
        first_attention_mask: torch.Tensor | None,
        second_input_ids: torch.Tensor,
        second_attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """forward_pair."""
        return self.forward_pair(
            first_input_ids, first_attention_mask, second_input_ids, second_attention_mask
        )

    def compute_bradley_terry_loss(
        self,
        input_ids_a: torch.Tensor,
        attention_mask_a: torch.Tensor | None,
        input_ids_b: torch.Tensor,
        attention_mask_b: torch.Tensor | None,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        """Mean of −y log σ(f) − (1 − y) log σ(−f), a scalar. labels: [B] or [B, 1], 1 if a is preferred.

        Raises BadInputError for other labels, or another number of them.
        """
        logits = self.forward_pair(input_ids_a, attention_mask_a, input_ids_b, attention_mask_b)[:, 0]
        return labelled_pair_loss(logits, labels)

    def _comparison(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtype = self.comparison_head[-1].weight.dtype
        a, b = a.to(dtype), b.to(dtype)
        return self.comparison_head(torch.cat([a, b], dim=1)) - self.comparison_head(torch.cat([b, a], dim=1))


def labelled_pair_loss(logits: torch.Tensor, labels: Any) -> torch.Tensor:
    """Mean of −y log σ(f) − (1 − y) log σ(−f) over pairs (Bradley and Terry 1952). logits, labels: [B]."""
    given = torch.as_tensor(labels, device=logits.device).reshape(-1)
    if len(given) != len(logits):
        raise BadInputError(f"labels: {len(given)} for {len(logits)} pairs; give one per pair.")
    wrong = ((given != 0) & (given != 1)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise BadInputError(
            f"labels[{at}]={given[at].item()!r}: must be 1 (the first is preferred) or 0 (the second is)."
        )
    signed = torch.where(given == 1, logits, -logits)
    return bradley_terry_loss(signed, torch.zeros_like(signed)).mean()
