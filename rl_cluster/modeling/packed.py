"""Sequences laid end to end go through a decoder without padding; attention never crosses a sequence.

Enters: a decoder of transformers whose attention is ATTENTION, tokens [T] and the lengths of the sequences.
Leaves: hidden states. Linear layers see no padding, and a prompt that several sequences begin with only once
(U unique tokens instead of T); only inside attention are the sequences laid out one by one and padded, in
buckets of like length, so it costs the sum of squares of the lengths, not T². A decoder with any other
attention goes through padded.py.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rl_cluster.config.planning.rope import named_in, rope_switch
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.attend import AttentionTerms, attend, window_mask
from rl_cluster.modeling.kv_cache import Calls, Decoding, KeyValueCache
from rl_cluster.modeling.layout import Bucket, PackedLayout
from rl_cluster.modeling.mask_pattern import MaskPattern, NotPackableError, mask_pattern
from rl_cluster.modeling.padded import padded_hidden_states

ATTENTION = "rl_cluster_packed"
"""transformers builds no mask for an attention of a name it has no mask function for, and hands ours None."""

CHECKED_ATTENTION = "rl_cluster_packed_checked"
"""The same attention; besides, every layer shows which mask transformers would have built for it."""

HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "return_dict"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Arguments that models hand to their attention and that change nothing in it."""

HAS_FLASH_ATTENTION = importlib.util.find_spec("flash_attn") is not None


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
    calls: Calls = field(default_factory=Calls)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: [1, kv_heads, T, D], of the prompts' tokens."""
        kept = [x[0].transpose(0, 1).index_select(0, self.copies) for x in (key, value)]
        self.cache.write(self.calls.slot(layer), self.rows, self.places, kept[0], kept[1])


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
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence. query: [1, heads, T, D]; key, value: [1, kv_heads, T, D].

    Returns [1, T, heads, D]. The signature is that of transformers' attention functions; the model hands
    `packed` through from the call of its decoder. With Prefill keys and values are kept besides; with
    Decoding there is one token per sequence, which attends to those kept before. Raises NotPackableError.
    """
    _check_arguments(module, packed, attention_mask, is_causal, others)
    terms = AttentionTerms(scaling, sliding_window, softcap, s_aux, dropout)
    if isinstance(packed, Decoding):
        return packed.attend(_layer(module), query, key, value, terms), None
    if isinstance(packed, Prefill):
        packed.store(_layer(module), key, value)
        packed = packed.packed
    assert packed is not None
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.expand is not None:
        queries, keys, values = (x.index_select(0, packed.expand) for x in (queries, keys, values))
    if _can_flash(queries, values, terms):
        output = _flash(queries, keys, values, packed, terms)
        return _only_unique(output, packed)[None], None
    outputs = [_bucket_attention(bucket, queries, keys, values, terms) for bucket in packed.buckets]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if packed.restore is not None:
        output = _Take.apply(output, packed.restore)
    return _only_unique(output, packed)[None], None


def _checked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskPattern | None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As packed_attention, after the layer's mask was compared with the window that it asks for."""
    kind = type(module).__name__
    if not isinstance(attention_mask, MaskPattern):
        raise NotPackableError(f"{kind} makes its attention mask in a way of its own")
    attention_mask.check(kind, sliding_window)
    return packed_attention(module, query, key, value, None, sliding_window=sliding_window, **others)


def _check_arguments(
    module: torch.nn.Module,
    packed: PackedLayout | Prefill | Decoding | None,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    """Nothing that a model asks for may be dropped silently."""
    kind = type(module).__name__
    if packed is None:
        raise NotPackableError(f"{kind} does not hand the layout through to its attention function")
    if attention_mask is not None:
        raise NotPackableError(f"{kind} makes an attention mask of its own")
    if is_causal is False:
        raise NotPackableError(f"{kind} asks for attention in both directions")
    for name, argument in others.items():
        if argument is not None and name not in HARMLESS:
            raise NotPackableError(
                f"{kind} hands its attention function {name!r}, which packed attention lacks"
            )


def _layer(module: torch.nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    assert isinstance(index, int), "attention without layer_idx: transformers' own caches need it, too"
    return index


def _only_unique(output: torch.Tensor, packed: PackedLayout) -> torch.Tensor:
    return output if packed.unique is None else _Take.apply(output, packed.unique)


def _bucket_attention(
    bucket: Bucket, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
) -> torch.Tensor:
    """query, key, value: packed [T, heads, D]. Returns the bucket's tokens end to end, [n, heads, D]."""
    padded = [_into_bucket(x, bucket) for x in (query, key, value)]
    visible = window_mask(bucket.length, terms.sliding_window, query.device)
    output = attend(padded[0], padded[1], padded[2], visible, terms)
    flat = output.transpose(1, 2).flatten(0, 1)
    return flat if bucket.places is None else _Take.apply(flat, bucket.places)


def _into_bucket(packed: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[T, heads, D] → [N, heads, L, D]."""
    flat = packed[bucket.start : bucket.stop] if bucket.gather is None else _Pad.apply(packed, bucket)
    return flat.unflatten(0, (bucket.num_sequences, bucket.length)).transpose(1, 2)


def _can_flash(query: torch.Tensor, value: torch.Tensor, terms: AttentionTerms) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    alike = query.shape[-1] == value.shape[-1] <= 256
    return HAS_FLASH_ATTENTION and query.is_cuda and half and alike and terms.is_plain


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedLayout, terms: AttentionTerms
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
        dropout_p=terms.dropout,
        softmax_scale=terms.scaling,
        causal=True,
    )


AttentionInterface.register(ATTENTION, packed_attention)
AttentionInterface.register(CHECKED_ATTENTION, _checked_attention)
AttentionMaskInterface.register(CHECKED_ATTENTION, mask_pattern)


def packed_hidden_states(
    decoder: torch.nn.Module, tokens: torch.Tensor, packed: PackedLayout
) -> torch.Tensor:
    """Last hidden states after the final norm, [U, hidden], for `packed.states_at`. tokens: int64 [T].

    The state at place t is the one after token t, from which token t + 1 is predicted.
    """
    check_rope(decoder, max(packed.lengths))
    if not is_packed(decoder):
        return padded_hidden_states(decoder, tokens, packed)
    if packed.unique is not None:
        tokens = tokens[packed.unique]
    return run_decoder(decoder, tokens, packed.position_ids, packed)


def check_rope(decoder: Any, longest: int) -> None:
    """Raise BadInputError where a sequence of so many tokens would change the frequencies of all others."""
    switch = rope_switch(named_in(decoder.config))
    if switch is not None and longest > switch:
        raise BadInputError(
            f"a sequence may have {longest} tokens, but the rotary positions of {type(decoder).__name__} "
            f"change for those of more than {switch} (rope type longrope or dynamic in its config.json), and "
            "with them its probabilities. Give shorter prompts (data.max_prompt_tokens) or responses "
            "(rollout.max_new_tokens), or a model without such a rope."
        )


def decoder_of(lm: Any) -> torch.nn.Module:
    """The part of a causal language model that makes the states which its head reads."""
    decoder = lm.get_decoder()
    if decoder is lm or not isinstance(decoder, PreTrainedModel):
        # transformers guesses by names, and takes Llama 4's for none and ModernBERT's head for one.
        decoder = next((part for part in lm.children() if isinstance(part, PreTrainedModel)), lm)
    return decoder


def is_packed(decoder: torch.nn.Module) -> bool:
    """Whether its layers keep packed sequences apart; else the sequences have to be rows of a batch."""
    return decoder.config._attn_implementation in (ATTENTION, CHECKED_ATTENTION)


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
