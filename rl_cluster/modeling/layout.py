"""Where sequences that are laid end to end lie, which of them share a prompt, and how attention pads them.

Enters: lengths and shared prefixes. Leaves: index tensors, made once per micro-batch. N sequences, T tokens
in packed order, U of them computed (U = T where no prompt is shared), L places of a bucket's longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

FULL_ENOUGH = 0.75
"""A sequence joins a bucket when it is at least this fraction of the bucket's longest."""


@dataclass(frozen=True)
class Bucket:
    """N sequences padded to L inside attention. start, stop: the tokens of the packed order it covers when
    they lie side by side and are equally long (no copy is made), else -1. Otherwise:
    gather: int64 [N * L], the packed token for each padded place (any token at padding).
    places: int64 [n], which of the N * L places are real; tokens: int64 [n], the packed tokens in them."""

    num_sequences: int
    length: int
    start: int
    stop: int
    gather: torch.Tensor | None = None
    places: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences are; made once per micro-batch, used by every layer.

    position_ids: int64 [1, U], 0 at the start of each sequence. cumulative: int32 [N + 1], their borders.
    restore: int64 [T], puts the buckets' tokens, laid end to end, back into packed order; None if they are.
    unique: int64 [U], the places of the T tokens that the model computes, and expand: int64 [T], which of
    the U each of the T is; both None where nothing is shared, and U is T.
    """

    lengths: tuple[int, ...]
    position_ids: torch.Tensor
    cumulative: torch.Tensor
    buckets: tuple[Bucket, ...]
    restore: torch.Tensor | None
    unique: torch.Tensor | None = None
    expand: torch.Tensor | None = None

    @staticmethod
    def of(
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        shared_prefixes: Sequence[tuple[int, int]] | None = None,
        full_enough: float = FULL_ENOUGH,
    ) -> PackedLayout:
        """lengths: tokens per sequence, each at least 1. shared_prefixes: per sequence (leader, n): its first
        n tokens are those of sequence `leader`, which comes before it or is the sequence itself.
        full_enough: see FULL_ENOUGH; at 0 there is one bucket."""
        # The indices are made with numpy: for so small arrays PyTorch's calls cost several times as much.
        sizes = np.array(list(lengths), dtype=np.int64)
        ends = np.cumsum(sizes)
        starts, total = ends - sizes, int(ends[-1])
        positions = np.arange(total) - np.repeat(starts, sizes)
        groups = _groups_of_like_length(sizes.tolist(), full_enough)
        order = np.concatenate([_tokens_of(group, starts, sizes) for group in groups])
        restore = None
        if not np.array_equal(order, np.arange(total)):
            restore = np.empty_like(order)
            restore[order] = np.arange(total)
        unique, expand = _sharing(shared_prefixes, starts, sizes)
        if unique is not None:
            positions = positions[unique]
        return PackedLayout(
            lengths=tuple(sizes.tolist()),
            position_ids=_tensor(positions[None], device),
            cumulative=_tensor(np.concatenate([[0], ends]).astype(np.int32), device),
            buckets=tuple(_bucket(group, starts, sizes, device) for group in groups),
            restore=None if restore is None else _tensor(restore, device),
            unique=None if unique is None else _tensor(unique, device),
            expand=None if expand is None else _tensor(expand, device),
        )

    def in_one_bucket(self) -> PackedLayout:
        """The same sequences, all padded to the longest."""
        if len(self.buckets) == 1:
            return self
        whole = PackedLayout.of(self.lengths, self.position_ids.device, full_enough=0.0)
        return replace(self, buckets=whole.buckets, restore=whole.restore)

    def states_at(self, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """hidden: [U, D], as packed_hidden_states returns it; the states at `places` among the T tokens."""
        return hidden.index_select(0, places if self.expand is None else self.expand[places])


def _sharing(
    shared_prefixes: Sequence[tuple[int, int]] | None, starts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(unique [U], expand [T]), or nothing where no sequence leans on another."""
    if shared_prefixes is None or all(leader == i for i, (leader, _) in enumerate(shared_prefixes)):
        return None, None
    total = int(sizes.sum())
    source = np.arange(total)
    for index, (leader, shared) in enumerate(shared_prefixes):
        if leader != index:
            assert leader < index
            assert shared <= min(int(sizes[leader]), int(sizes[index]))
            begin, borrowed = int(starts[index]), int(starts[leader])
            source[begin : begin + shared] = source[borrowed : borrowed + shared]
    unique = np.flatnonzero(source == np.arange(total))
    number = np.empty_like(source)
    number[unique] = np.arange(len(unique))
    return unique, number[source]


def _groups_of_like_length(lengths: list[int], full_enough: float) -> list[list[int]]:
    """Sequences, longest first, cut where the length falls below full_enough of the group's longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[index] >= full_enough * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _tokens_of(group: list[int], starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(starts[i], starts[i] + sizes[i]) for i in group])


def _bucket(group: list[int], starts: np.ndarray, sizes: np.ndarray, device: torch.device | str) -> Bucket:
    longest = int(sizes[group].max())
    tokens = _tokens_of(group, starts, sizes)
    first = int(tokens[0])
    if len(tokens) == len(group) * longest and np.array_equal(tokens, np.arange(first, first + len(tokens))):
        return Bucket(len(group), longest, first, first + len(tokens))
    place = np.arange(longest)
    valid = place[None, :] < sizes[group][:, None]
    gather = np.where(valid, starts[group][:, None] + place[None, :], 0).ravel()
    places = np.flatnonzero(valid)
    return Bucket(len(group), longest, -1, -1, *(_tensor(x, device) for x in (gather, places, tokens)))


def _tensor(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
