"""Which sequences of a micro-batch begin alike, and how far, as PackedLayout.of wants to know it.

What a decoder computes for a token depends on the tokens before it alone, so a common beginning is computed
once, whatever in it is prompt and whatever was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

LEAST_SHARED = 2
"""A single token (that with which every sequence of a model begins) is not worth the indices."""


def shared_prefixes(tokens: np.ndarray, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(leader, n) per sequence: the earlier sequence with which it has most tokens in common at the
    beginning, and how many; itself and 0 where that are too few.

    tokens: int [T], sequences end to end. Sorted, the sequences nearest to one share most with it; taken away
    from the last to the first, its neighbours are earlier ones.
    """
    ends = np.cumsum(lengths)
    rows = [tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    keys = [row.astype(">u4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (keys[i], i))
    after = dict(pairwise(order))
    before = {right: left for left, right in after.items()}
    common = {right: _common(rows[left], rows[right]) for right, left in before.items()}
    result = [(i, 0) for i in range(len(rows))]
    for i in reversed(range(len(rows))):
        left, right = before.pop(i, None), after.pop(i, None)
        with_left, with_right = common.pop(i, 0), 0 if right is None else common[right]
        leader, shared = (left, with_left) if with_left >= with_right else (right, with_right)
        if leader is not None and shared >= LEAST_SHARED:
            result[i] = (leader, shared)
        if left is not None and right is not None:
            after[left], before[right], common[right] = right, left, min(with_left, with_right)
        elif left is not None:
            after.pop(left)
        elif right is not None:
            before.pop(right)
            common.pop(right)
    return result


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens they have in common at the beginning."""
    most = min(len(one), len(other))
    different = one[:most] != other[:most]
    first = int(different.argmax()) if most else 0
    return first if most and different[first] else most
