"""Sequences laid end to end go through a decoder without padding; attention never crosses a sequence.

Enters: a decoder of transformers that was loaded with `attn_implementation=ATTENTION`, tokens [T] and the
lengths of the sequences. Leaves: hidden states. Linear layers see no padding, and a prompt that several
sequences begin with only once (U unique tokens instead of T); only inside attention are the sequences laid
out one by one and padded, in buckets of like length, so it costs the sum of squares of the lengths, not T².
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rl_cluster.errors import BadInputError
from rl_cluster.modeling.kv_cache import Decoding, KeyValueCache

ATTENTION = "rl_cluster_packed"
"""transformers builds no mask for an attention of a name it has no mask function for, and hands ours None."""

FULL_ENOUGH = 0.75
"""A sequence joins a bucket when it is at least this fraction of the bucket's longest."""

HAS_FLASH_ATTENTION = importlib.util.find_spec("flash_attn") is not None


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
    ) -> PackedLayout:
        """lengths: tokens per sequence, each at least 1. shared_prefixes: per sequence (leader, n): its first
        n tokens are those of sequence `leader`, which comes before it or is the sequence itself."""
        # The indices are made with numpy: for so small arrays PyTorch's calls cost several times as much.
        sizes = np.array(list(lengths), dtype=np.int64)
        ends = np.cumsum(sizes)
        starts, total = ends - sizes, int(ends[-1])
        positions = np.arange(total) - np.repeat(starts, sizes)
        groups = _groups_of_like_length(sizes.tolist())
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


def _groups_of_like_length(lengths: list[int]) -> list[list[int]]:
    """Sequences, longest first, cut where the length falls below FULL_ENOUGH of the group's longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[index] >= FULL_ENOUGH * lengths[groups[-1][0]]:
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


@dataclass(frozen=True)
class Prefill:
    """A packed forward pass of prompts whose keys and values are kept, for N sequences that continue them.

    copies: int64 [n], tokens of the packed order, and rows, places: int64 [n], where in the cache each goes.
    """

    packed: PackedLayout
    cache: KeyValueCache
    copies: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: [1, kv_heads, T, D], of the prompts' tokens."""
        kept = [x[0].transpose(0, 1).index_select(0, self.copies) for x in (key, value)]
        self.cache.write(layer, self.rows, self.places, kept[0], kept[1])


class _Pad(torch.autograd.Function):
    """[T, …] → [N * L, …]. Padding holds copies of token 0; under a causal mask no real query sees them, so
    their gradient is 0 and the backward pass is the inverse gather instead of a scatter-add."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        assert bucket.gather is not None
        ctx.bucket, ctx.num_tokens = bucket, packed.shape[0]
        return packed.index_select(0, bucket.gather)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = gradient.new_zeros(ctx.num_tokens, *gradient.shape[1:])
        result.index_copy_(0, ctx.bucket.tokens, gradient.index_select(0, ctx.bucket.places))
        return result, None


class _Take(torch.autograd.Function):
    """[n, …] → [m, …], the rows at `index`, which holds no row twice (so the gradient is a plain copy)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.index, ctx.num_rows = index, rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = gradient.new_zeros(ctx.num_rows, *gradient.shape[1:])
        return result.index_copy_(0, ctx.index, gradient), None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packed: PackedLayout | Prefill | Decoding | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence. query: [1, heads, T, D]; key, value: [1, kv_heads, T, D].

    Returns [1, T, heads, D]. The signature is that of transformers' attention functions; the model hands
    `packed` through from the call of its decoder. With Prefill keys and values are kept besides; with
    Decoding there is one token per sequence, which attends to those kept before.
    """
    assert packed is not None, "call the decoder through packed_hidden_states"
    assert attention_mask is None, "transformers built a mask that packed attention cannot use"
    if softcap is not None:
        raise BadInputError("model: attention with soft-capping cannot be packed; choose another model")
    if isinstance(packed, Decoding):
        return packed.attend(_layer(module), query, key, value, scaling, sliding_window), None
    if isinstance(packed, Prefill):
        packed.store(_layer(module), key, value)
        packed = packed.packed
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.expand is not None:
        queries, keys, values = (x.index_select(0, packed.expand) for x in (queries, keys, values))
    if _can_flash(queries, sliding_window):
        output = _flash(queries, keys, values, packed, dropout, scaling)
        return _only_unique(output, packed)[None], None
    outputs = [
        _bucket_attention(bucket, queries, keys, values, dropout, scaling, sliding_window)
        for bucket in packed.buckets
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if packed.restore is not None:
        output = _Take.apply(output, packed.restore)
    return _only_unique(output, packed)[None], None


def _layer(module: torch.nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    assert isinstance(index, int), "attention without layer_idx: transformers' own caches need it, too"
    return index


def _only_unique(output: torch.Tensor, packed: PackedLayout) -> torch.Tensor:
    return output if packed.unique is None else _Take.apply(output, packed.unique)


def _bucket_attention(
    bucket: Bucket,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """query, key, value: packed [T, heads, D]. Returns the bucket's tokens end to end, [n, heads, D]."""
    padded = [_into_bucket(x, bucket) for x in (query, key, value)]
    repeats = query.shape[1] // key.shape[1]
    mask = None
    if sliding_window is not None and bucket.length > sliding_window:
        place = torch.arange(bucket.length, device=query.device)
        distance = place[:, None] - place[None, :]
        mask = (distance >= 0) & (distance < sliding_window)
    output = scaled_dot_product_attention(
        padded[0],
        padded[1],
        padded[2],
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=mask is None,
        enable_gqa=repeats > 1,
    )
    flat = output.transpose(1, 2).flatten(0, 1)
    return flat if bucket.places is None else _Take.apply(flat, bucket.places)


def _into_bucket(packed: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[T, heads, D] → [N, heads, L, D]."""
    flat = packed[bucket.start : bucket.stop] if bucket.gather is None else _Pad.apply(packed, bucket)
    return flat.unflatten(0, (bucket.num_sequences, bucket.length)).transpose(1, 2)


def _can_flash(query: torch.Tensor, sliding_window: int | None) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return HAS_FLASH_ATTENTION and query.is_cuda and half and sliding_window is None


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedLayout,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    longest = max(packed.lengths)
    return flash_attn_varlen_func(
        query,
        key,
        value,
        packed.cumulative,
        packed.cumulative,
        longest,
        longest,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
    )


AttentionInterface.register(ATTENTION, packed_attention)


def packed_hidden_states(
    decoder: torch.nn.Module, tokens: torch.Tensor, packed: PackedLayout
) -> torch.Tensor:
    """Last hidden states after the final norm, [U, hidden], for `packed.states_at`. tokens: int64 [T].

    The state at place t is the one after token t, from which token t + 1 is predicted.
    """
    if packed.unique is not None:
        tokens = tokens[packed.unique]
    return run_decoder(decoder, tokens, packed.position_ids, packed)


def run_decoder(
    decoder: torch.nn.Module,
    tokens: torch.Tensor,
    position_ids: torch.Tensor,
    packed: PackedLayout | Prefill | Decoding,
) -> torch.Tensor:
    """Last hidden states [U, hidden] of the tokens [U] that are computed; position_ids: int64 [1, U]."""
    output = decoder(
        input_ids=tokens[None],
        position_ids=position_ids,
        attention_mask=None,
        use_cache=False,
        packed=packed,
    )
    return output.last_hidden_state[0]
