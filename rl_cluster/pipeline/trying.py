"""What a caller's model does with padding and with its own cache is tried on a few tokens, not believed.

Some recurrent models read padding before a text as text, and some continue wrongly from what they kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ALLOWED, ALLOWED_IN_HALF = 1e-3, 0.1
"""Nats: the largest difference in full precision, the mean one in half precision."""
TRIED, KEPT = 8, 4
"""Tokens of a trial, and how many of them come first."""

Step = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]
"""(ids [1, l], cache or None) -> logits [V] after them, and the cache; None where the model gives none."""


def alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tables of logits [n, V] say the same."""
    is_full = found.dtype in (torch.float32, torch.float64)
    gaps = (found.float().log_softmax(-1) - expected.float().log_softmax(-1)).abs()
    # What may not be drawn is −∞ in both.
    gaps = gaps[~(found.isneginf() & expected.isneginf())]
    return gaps.numel() == 0 or float(gaps.max() if is_full else gaps.mean()) <= (
        ALLOWED if is_full else ALLOWED_IN_HALF
    )


@torch.no_grad()
def continues(step: Step, whole: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> bool:
    """Whether the model's cache gives what the whole tokens give. whole: ids [1, l] -> logits [l, V].
    ids: [n], those of the trial, at least two."""
    first = min(KEPT, len(ids) - 1)
    logits, cache = step(ids[None, :first], None)
    rows = [logits]
    for token in ids[first:]:
        if cache is None:
            return False
        logits, cache = step(token[None, None], cache)
        rows.append(logits)
    return alike(torch.stack(rows), whole(ids[None])[first - 1 :])


@torch.no_grad()
def keeps_padding_out(run: Callable[..., torch.Tensor], ids: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether the row that begins with the most padding says the same without it. run: ids, mask [1, l] ->
    logits [l, V]. ids, mask: [B, L]."""
    before = mask.int().argmax(-1)
    row = int(before.argmax())
    start = int(before[row])
    padded = run(ids[row][None], mask[row][None])
    plain = run(ids[row][None, start:], mask[row][None, start:])
    seen = mask[row, start:]
    return alike(padded[start:][seen], plain[seen])
