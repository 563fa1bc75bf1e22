"""Keys and values of tokens that went through a decoder before: a decoding step attends to them.

The same decoder, loaded with `packed.ATTENTION`, serves training and generation: what changes is the layout
that rides along with the call. Legend: N sequences, K key-value heads, H heads, L places, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rl_cluster.modeling.attend import AttentionTerms, attend

BLOCK = 64
"""Attention always spans a multiple of so many places: neighbours of other lengths cannot change its sums."""


Slot = tuple[int, int]
"""(layer, which of its calls in a pass): some models attend twice in a layer, or go through it twice."""


class Calls:
    """Numbers the calls of each layer within one pass."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def slot(self, layer: int) -> Slot:
        count = self._counts.get(layer, 0)
        self._counts[layer] = count + 1
        return layer, count


class KeyValueCache:
    """N sequences of at most `capacity` tokens. lengths: int64 [N], tokens of each so far."""

    def __init__(self, num_sequences: int, capacity: int, device: torch.device | str) -> None:
        self.lengths = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        self.capacity = -(-capacity // BLOCK) * BLOCK
        self._slots: dict[Slot, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(
        self, slot: Slot, rows: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put keys and values [n, K, D] of n tokens at (row, place); the whole [N, L, K, D] of both."""
        if slot not in self._slots:
            shape = (len(self.lengths), self.capacity, *keys.shape[1:])
            self._slots[slot] = keys.new_zeros(shape), values.new_zeros((*shape[:-1], values.shape[-1]))
        all_keys, all_values = self._slots[slot]
        all_keys[rows, places] = keys
        all_values[rows, places] = values
        return all_keys, all_values

    def advance(self) -> None:
        """Every sequence has a token more; one that is full, and so has ended, stays at the last place."""
        self.lengths = (self.lengths + 1).clamp_(max=self.capacity - 1)

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all sequences but these (int64 [n]), which become 0 to n − 1."""
        self.lengths = self.lengths[rows]
        self._slots = {slot: (k[rows], v[rows]) for slot, (k, v) in self._slots.items()}


@dataclass(frozen=True)
class Decoding:
    """One new token for each of the N sequences. rows: 0 to N − 1. places: int64 [N], where the token goes.
    span: places that are attended to, a multiple of BLOCK. visible: bool [N, 1, 1, span], up to the token."""

    cache: KeyValueCache
    rows: torch.Tensor
    places: torch.Tensor
    span: int
    visible: torch.Tensor
    calls: Calls = field(default_factory=Calls)

    @staticmethod
    def of(cache: KeyValueCache) -> Decoding:
        places = cache.lengths
        span = (int(places.max()) // BLOCK + 1) * BLOCK
        place = torch.arange(span, device=places.device)
        visible = (place[None, :] <= places[:, None])[:, None, None, :]
        return Decoding(cache, torch.arange(len(places), device=places.device), places, span, visible)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        terms: AttentionTerms,
    ) -> torch.Tensor:
        """query: [1, H, N, D]; key, value: [1, K, N, D], of the new tokens. Returns [1, N, H, D]."""
        keys, values = self.cache.write(
            self.calls.slot(layer), self.rows, self.places, key[0].transpose(0, 1), value[0].transpose(0, 1)
        )
        visible = self.visible
        if terms.sliding_window is not None and self.span > terms.sliding_window:
            place = torch.arange(self.span, device=visible.device)
            visible = visible & (place > (self.places - terms.sliding_window)[:, None, None, None])
        output = attend(
            query[0].transpose(0, 1)[:, :, None],
            keys[:, : self.span].transpose(1, 2),
            values[:, : self.span].transpose(1, 2),
            visible,
            terms,
        )
        return output[:, :, 0][None]
