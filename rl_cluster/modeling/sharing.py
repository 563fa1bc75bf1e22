"""Which sequences of a micro-batch begin with the same prompt, as PackedLayout.of wants to know it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shared_prompts(
    tokens: np.ndarray, lengths: Sequence[int], action_mask: np.ndarray
) -> list[tuple[int, int]]:
    """(leader, n) per sequence: the first sequence with the same n prompt tokens, n up to its first action.

    tokens: int [T], sequences end to end; action_mask: bool [T]. A sequence without actions, or the first
    with its prompt, leads itself.
    """
    first_with: dict[bytes, int] = {}
    result = []
    start = 0
    for index, length in enumerate(lengths):
        mask = action_mask[start : start + length]
        prompt = int(mask.argmax()) if mask.any() else 0
        key = tokens[start : start + prompt].tobytes()
        leader = first_with.setdefault(key, index) if prompt > 0 else index
        result.append((leader, prompt))
        start += length
    return result
