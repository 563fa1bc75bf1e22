"""Queries, keys and values of padded sequences go in, what attention makes of them comes out.

Legend: N sequences, H heads, K key-value heads, Q query places, L key places, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import dropout, pad, scaled_dot_product_attention


@dataclass(frozen=True)
class AttentionTerms:
    """What a layer asks for. scaling: of the scores, None for 1/√D. sliding_window: places a query sees, its
    own included. softcap: scores s become softcap · tanh(s / softcap). sinks: [H], a score that takes part in
    the softmax and has no value."""

    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self.sliding_window is None and self.softcap is None and self.sinks is None


def window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """bool [length, length], causal within the window; None where plain causality says the same."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    terms: AttentionTerms,
) -> torch.Tensor:
    """query: [N, H, Q, D]; key: [N, K, L, D]; value: [N, K, L, E]. Returns [N, H, Q, E].

    visible: bool, broadcast to [N, H, Q, L]; None: causal, Q equals L.
    """
    if terms.softcap is not None:
        return _explicit(query, key, value, visible, terms)
    if terms.sinks is not None:
        return _with_sink_place(query, key, value, visible, terms)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        dropout_p=terms.dropout,
        scale=terms.scaling,
        is_causal=visible is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    terms: AttentionTerms,
) -> torch.Tensor:
    """Score by score, as transformers' eager attention."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query @ keys.transpose(2, 3) * _scaling(query, terms)
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    scores = scores.masked_fill(~_visible(visible, query, key), torch.finfo(scores.dtype).min)
    if terms.sinks is not None:
        scores = torch.cat(
            [scores, terms.sinks.to(scores)[None, :, None, None].expand(*scores.shape[:3], 1)], -1
        )
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(torch.float32, scores.dtype))
    weights = dropout(weights[..., : key.shape[2]].to(query.dtype), terms.dropout)
    return weights @ values


def _with_sink_place(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    terms: AttentionTerms,
) -> torch.Tensor:
    """The sink as one key place more: in a dimension of its own, the query holds the sink's score, the sink's
    key 1 and all other keys 0; the sink's value is 0. So the fused kernel serves, and differentiates it."""
    assert terms.sinks is not None
    scaling = _scaling(query, terms)
    score = (terms.sinks.to(query) / scaling)[None, :, None, None].expand(*query.shape[:3], 1)
    sink = pad(torch.zeros_like(key[:, :, :1]), (0, 1), value=1.0)
    seen = _visible(visible, query, key)
    return scaled_dot_product_attention(
        torch.cat([query, score], dim=-1),
        torch.cat([pad(key, (0, 1)), sink], dim=2),
        torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=2),
        attn_mask=pad(seen, (0, 1), value=True),
        dropout_p=terms.dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _scaling(query: torch.Tensor, terms: AttentionTerms) -> float:
    return query.shape[-1] ** -0.5 if terms.scaling is None else terms.scaling


def _visible(visible: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    if visible is not None:
        return visible
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
