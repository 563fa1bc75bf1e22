"""Texts with preferences or targets in; the loss of any rows of them, on a reward model, out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rl_cluster.checks import check_texts
from rl_cluster.errors import BadInputError
from rl_cluster.reward_models.multi_objective import MultiObjectiveRewardModel
from rl_cluster.reward_models.reward_model import RewardModel, preference_loss


class TrainingData(Protocol):
    """What an epoch is made of."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def weight(self, rows: Sequence[int]) -> float:
        """How many entries the mean of `loss(rows)` is over; batches are combined in this proportion."""
        ...

    def loss(self, rows: Sequence[int]) -> tuple[torch.Tensor, dict[str, float]]:
        """(mean loss over the rows, a scalar with a graph; other means over them)."""
        ...


class PreferencePairs:
    """Better and worse texts; loss −log σ(f), accuracy the share of pairs with f > 0 (ties count half)."""

    def __init__(
        self,
        model: RewardModel,
        tokenizer: Any,
        chosen_texts: Sequence[str],
        rejected_texts: Sequence[str],
        max_length: int,
    ) -> None:
        check_texts("chosen_texts", chosen_texts)
        check_texts("rejected_texts", rejected_texts)
        if len(chosen_texts) != len(rejected_texts):
            raise BadInputError(
                f"chosen_texts, rejected_texts: {len(chosen_texts)} chosen for {len(rejected_texts)} "
                "rejected; give one of each per pair."
            )
        self._model, self._tokenizer, self._max_length = model, tokenizer, max_length
        self._chosen, self._rejected = chosen_texts, rejected_texts

    def __len__(self) -> int:
        return len(self._chosen)

    def weight(self, rows: Sequence[int]) -> float:
        return float(len(rows))

    def loss(self, rows: Sequence[int]) -> tuple[torch.Tensor, dict[str, float]]:
        chosen = self._encode([self._chosen[row] for row in rows])
        logits = self._model.preference_logits(*chosen, *self._encode([self._rejected[row] for row in rows]))
        known = logits.detach()
        hits = (known > 0).double() + 0.5 * (known == 0).double()
        means = {"accuracy": hits.mean().item(), "margin": known.double().mean().item()}
        return preference_loss(logits), means

    def _encode(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.encode(texts, self._tokenizer, self._max_length)


class ScoredTexts:
    """Texts with a target per objective; loss: the squared error over the entries that the mask keeps."""

    def __init__(
        self,
        model: RewardModel,
        tokenizer: Any,
        texts: Sequence[str],
        target_rewards: Any,
        objective_mask: Any,
        max_length: int,
    ) -> None:
        if not isinstance(model, MultiObjectiveRewardModel):
            raise BadInputError(
                f"model={type(model).__name__}: targets per objective need a MultiObjectiveRewardModel."
            )
        check_texts("texts", texts)
        self._model, self._tokenizer, self._max_length = model, tokenizer, max_length
        self._texts = texts
        shape = (len(texts), model.num_objectives)
        self._targets = _table("target_rewards", target_rewards, shape)
        if objective_mask is None:
            self._mask = torch.ones(shape)
        else:
            mask = torch.as_tensor(objective_mask, dtype=torch.float32)
            self._mask = _table("objective_mask", mask.expand(shape) if mask.dim() == 1 else mask, shape)
        if not bool(torch.isfinite(self._targets[self._mask == 1]).all()):
            raise BadInputError(
                "target_rewards: holds NaN or infinity; give finite targets, or leave them out by "
                "objective_mask."
            )

    def __len__(self) -> int:
        return len(self._texts)

    def weight(self, rows: Sequence[int]) -> float:
        return float(self._mask[list(rows)].sum())

    def loss(self, rows: Sequence[int]) -> tuple[torch.Tensor, dict[str, float]]:
        ids, mask = self._model.encode([self._texts[row] for row in rows], self._tokenizer, self._max_length)
        loss, _ = self._model.compute_multi_objective_loss(
            ids, mask, self._targets[list(rows)], self._mask[list(rows)]
        )
        return loss, {}


def _table(field: str, values: Any, shape: tuple[int, int]) -> torch.Tensor:
    try:
        table = torch.as_tensor(values, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"{field}: is no table of numbers ({error}); give {shape} of them.") from error
    if table.shape != shape:
        raise BadInputError(f"{field}: {tuple(table.shape)}; give {shape}, texts by objectives.")
    return table
