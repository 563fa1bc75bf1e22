"""Token ids and their mask in, rows in right-padded order and one hidden state per row out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rl_cluster.errors import BadInputError


@dataclass(frozen=True)
class PaddedRows:
    """Rows with their real tokens first, as every architecture reads them alike.

    input_ids, attention_mask (0 or 1): int64 [B, L]. order: int64 [B, L], the place in the given row of each
    token here; None where the rows were given like this.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    order: torch.Tensor | None

    def given_order(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [B, L, H] of these rows -> at the places of the rows as they were given."""
        if self.order is None:
            return hidden
        index = self.order.argsort(dim=1)[:, :, None].expand_as(hidden)
        return hidden.gather(1, index)


def right_padded(input_ids: Any, attention_mask: Any = None) -> PaddedRows:
    """Check both and move what the mask leaves out behind the real tokens, whatever side it was on.

    Absolute positions then count from a text's first token, also in models that number the columns.
    attention_mask: [B, L] of any dtype, 1 for real tokens and 0 for others; None: all are real.
    Raises BadInputError for wrong shapes, other values in the mask, and a row without a token.
    """
    ids = _token_ids(input_ids)
    if attention_mask is None:
        return PaddedRows(ids, torch.ones_like(ids), None)
    mask = _mask(attention_mask, ids)
    if bool((mask[:, 1:] <= mask[:, :-1]).all()):
        return PaddedRows(ids, mask, None)
    order = (1 - mask).argsort(dim=1, stable=True)
    return PaddedRows(ids.gather(1, order), mask.gather(1, order), order)


def pool(hidden: torch.Tensor, mask: torch.Tensor, strategy: str) -> torch.Tensor:
    """[B, H] of hidden [B, L, H] whose rows are padded on the right; mask: [B, L] of 0 and 1.

    strategy: "last", "mean" (in float32 or better) or "cls"; see RewardModelConfig.
    """
    return _STRATEGIES[strategy](hidden, mask)


def _last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, mask.sum(dim=1) - 1]


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    # where, not a product: what stands at padding may be NaN.
    kept = torch.where(mask[:, :, None] == 1, wide, torch.zeros_like(wide))
    return kept.sum(dim=1) / mask.sum(dim=1, keepdim=True)


def _first(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[:, 0]


_STRATEGIES = {"last": _last, "mean": _mean, "cls": _first}


def _token_ids(input_ids: Any) -> torch.Tensor:
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.numel() == 0:
        shown = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise BadInputError(
            f"input_ids: {shown}; give a tensor of token ids [batch, length], both at least 1."
        )
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise BadInputError(f"input_ids: dtype {input_ids.dtype}; token ids are whole numbers (torch.int64).")
    return input_ids.long()


def _mask(attention_mask: Any, ids: torch.Tensor) -> torch.Tensor:
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != ids.shape:
        shape = getattr(attention_mask, "shape", None)
        shown = type(attention_mask).__name__ if shape is None else tuple(shape)
        raise BadInputError(
            f"attention_mask: {shown} for input_ids {tuple(ids.shape)}; give one of that shape."
        )
    given = attention_mask.to(ids.device)
    if not bool(((given == 0) | (given == 1)).all()):
        raise BadInputError(
            "attention_mask: holds values other than 0 and 1; 1 marks a real token, 0 padding."
        )
    mask = given.long()
    empty = (mask.sum(dim=1) == 0).nonzero()
    if len(empty):
        raise BadInputError(
            f"attention_mask: row {int(empty[0])} has no real token; leave empty texts out of the batch."
        )
    return mask
