"""Token ids of texts in; a reward per text, losses on pairs, and a reward function for training out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from rl_cluster.algorithms.preference import bradley_terry_loss
from rl_cluster.checks import check_number, check_texts, check_whole_number
from rl_cluster.errors import BadInputError
from rl_cluster.reward_models.base import (
    hidden_size,
    hidden_states,
    make_trunk,
    max_positions,
    vocabulary_size,
)
from rl_cluster.reward_models.config import RewardModelConfig
from rl_cluster.reward_models.pooling import pool, right_padded
from rl_cluster.reward_models.texts import encode, padding_tokenizer

RewardFunction = Callable[..., list[float]]
"""f(prompts, responses, metadata=None) -> one score per response."""


@dataclass
class RewardOutput(ModelOutput):
    """rewards [B, num_labels]; pooled_output [B, H]; last_hidden_state [B, L, H], rows as they were given.

    Entries are read as output["rewards"] and as output.rewards.
    """

    rewards: torch.Tensor | None = None
    pooled_output: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None


class RewardModel(nn.Module):
    """A trunk and a linear head on one hidden state per text: reward = head(pooled) / temperature.

    base_model: a module whose output has hidden states (a transformers model's own head is left out), a
    folder or a hub name; None: config.model_name. It is used as it is, not copied; with LoRA the adapters
    are put into it. The head has no bias: it would be the same for every text.
    Raises BadInputError for a base that cannot be used.
    """

    head_bias = False

    def __init__(self, config: RewardModelConfig, base_model: Any = None) -> None:
        super().__init__()
        if not isinstance(config, RewardModelConfig):
            raise BadInputError(f"config={config!r:.60}: give a RewardModelConfig.")
        self.config = config
        with seeded(config.seed):
            self.base_model = make_trunk(config, base_model)
            self.hidden_size = hidden_size(self.base_model)
            self.reward_head = nn.Sequential(
                nn.Dropout(config.dropout_prob),
                nn.Linear(self.hidden_size, config.num_labels, bias=self.head_bias),
            )
        self._place_heads()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, return_dict: bool = True
    ) -> RewardOutput | torch.Tensor:
        """RewardOutput, or the rewards [B, num_labels] alone if return_dict is False.

        input_ids: [B, L]. attention_mask: [B, L], 1 or True for real tokens, which may stand on either side;
        None: all are real. A reward does not depend on the amount or the side of padding.
        """
        hidden, pooled = self.pooled(input_ids, attention_mask)
        rewards = self.rewards_of(pooled)
        return RewardOutput(rewards, pooled, hidden) if return_dict else rewards

    def pooled(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden states [B, L, H] at the places given, pooled [B, H])."""
        rows = right_padded(input_ids, attention_mask)
        hidden = hidden_states(self.base_model, rows.input_ids, rows.attention_mask, self.hidden_size)
        return rows.given_order(hidden), pool(hidden, rows.attention_mask, self.config.pooling_strategy)

    def rewards_of(self, pooled: torch.Tensor) -> torch.Tensor:
        """[B, num_labels] of pooled [B, H]."""
        head = self.reward_head
        return head(pooled.to(head[-1].weight.dtype)) / self.config.temperature

    def preference_logits(
        self,
        first_input_ids: torch.Tensor,
        first_attention_mask: torch.Tensor | None,
        second_input_ids: torch.Tensor,
        second_attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """[B, num_labels]: log-odds that the first text of each pair is the better, r_first − r_second."""
        check_pairs(first_input_ids, second_input_ids)
        first = self(first_input_ids, first_attention_mask, return_dict=False)
        return first - self(second_input_ids, second_attention_mask, return_dict=False)

    def compute_preference_loss(
        self,
        chosen_input_ids: torch.Tensor,
        chosen_attention_mask: torch.Tensor | None,
        rejected_input_ids: torch.Tensor,
        rejected_attention_mask: torch.Tensor | None,
        margin: float | torch.Tensor = 0.0,
    ) -> torch.Tensor:
        """Mean of −log σ(r_chosen − r_rejected − margin) over pairs (and labels), a scalar.

        margin: a number, or one per pair [B] (Touvron et al. 2023, equation 2); 0 is Bradley and Terry's.
        """
        logits = self.preference_logits(
            chosen_input_ids, chosen_attention_mask, rejected_input_ids, rejected_attention_mask
        )
        return preference_loss(logits, margin)

    def combined(self, rewards: torch.Tensor) -> torch.Tensor:
        """[B, 1]: the one number per text that training on this model maximises. rewards: [B, num_labels]."""
        if self.config.num_labels != 1:
            raise BadInputError(
                f"RewardModelConfig.num_labels={self.config.num_labels}: one score per text needs 1; use a "
                "MultiObjectiveRewardModel, which weighs several."
            )
        return rewards

    @torch.no_grad()
    def predict_rewards(
        self, texts: Sequence[str], tokenizer: Any, max_length: int = 512, batch_size: int = 8
    ) -> list[list[float]]:
        """num_labels numbers per text, without dropout; the training mode is restored.

        Texts longer than max_length, or than the base has positions, are cut at the tokenizer's
        truncation_side.
        """
        check_texts("texts", texts)
        check_whole_number("max_length", max_length)
        check_whole_number("batch_size", batch_size)
        rows: list[list[float]] = []
        with evaluating(self):
            for start in range(0, len(texts), batch_size):
                batch = self.encode(texts[start : start + batch_size], tokenizer, max_length)
                rows += self.predicted(*batch).float().tolist()
        return rows

    def predicted(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """[B, num_labels]: what predict_rewards gives."""
        return self(input_ids, attention_mask, return_dict=False)

    def encode(
        self, texts: Sequence[str], tokenizer: Any, max_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, attention_mask) of texts on the model's device, cut to what the base has places for."""
        positions = max_positions(self.base_model)
        limit = max_length if positions is None else min(max_length, positions)
        ids, mask = encode(texts, padding_tokenizer(tokenizer), limit, vocabulary_size(self.base_model))
        device = self.reward_head[-1].weight.device
        return ids.to(device), mask.to(device)

    def as_reward_fn(self, tokenizer: Any, max_length: int = 512, batch_size: int = 8) -> RewardFunction:
        """f(prompts, responses, metadata=None) -> the score of each prompt + response, for any trainer."""
        self.combined(torch.zeros(1, self.config.num_labels))  # refuses now what could not be scored later

        def score(prompts: Sequence[str], responses: Sequence[str], metadata: Any = None) -> list[float]:
            check_texts("prompts", prompts)
            check_texts("responses", responses, may_be_blank=True)
            if len(prompts) != len(responses):
                raise BadInputError(
                    f"prompts, responses: {len(prompts)} prompts for {len(responses)} responses; give one "
                    "each."
                )
            texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
            rewards = torch.tensor(self.predict_rewards(texts, tokenizer, max_length, batch_size))
            result: list[float] = self.combined(rewards)[:, 0].tolist()
            return result

        return score

    def arguments(self) -> dict[str, Any]:
        """What the constructor takes besides config and base_model, as JSON has it."""
        return {}

    def _place_heads(self) -> None:
        """Heads stand where the base does, in float32 (float64 under a base of float64)."""
        first = next(self.base_model.parameters(), None)
        if first is None:
            return
        dtype = torch.promote_types(first.dtype, torch.float32)
        for name, child in self.named_children():
            if name != "base_model":
                child.to(device=first.device, dtype=dtype)


def preference_loss(logits: torch.Tensor, margin: float | torch.Tensor = 0.0) -> torch.Tensor:
    """Mean of −log σ(logits − margin), a scalar. logits: [B, n]; margin: a number, or [B]."""
    if isinstance(margin, torch.Tensor):
        if margin.numel() not in (1, len(logits)) or not bool(torch.isfinite(margin).all()):
            raise BadInputError(
                f"margin: {tuple(margin.shape)} for {len(logits)} pairs; give one finite number, or one "
                "per pair."
            )
        margin = margin.to(logits.device).reshape(-1, 1)
    else:
        check_number("margin", margin)
    return bradley_terry_loss(logits, torch.zeros_like(logits), margin).mean()


def check_pairs(first: Any, second: Any) -> None:
    """BadInputError unless both are batches of as many rows."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and len(first) != len(second):
        raise BadInputError(f"input_ids: {len(first)} texts against {len(second)}; a pair needs one of each.")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within, PyTorch's generator starts from seed; afterwards it is as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within, the model is in eval mode; afterwards every module of it is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
