"""A sequence whose last tokens come one at a time, as a sampler feeds them; to examine a model."""

from __future__ import annotations

import torch

from rl_cluster.modeling.kv_cache import Decoding, KeyValueCache
from rl_cluster.modeling.layout import PackedLayout
from rl_cluster.modeling.packed import Prefill, run_decoder


def continued_states(decoder: torch.nn.Module, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """States [T − prompt, hidden] of the tokens behind the first `prompt`, each in a step of its own."""
    device = tokens.device
    cache = KeyValueCache(1, len(tokens), device)
    layout, places = PackedLayout.of([prompt], device), torch.arange(prompt, device=device)
    prefill = Prefill(layout, cache, places, torch.zeros_like(places), places)
    run_decoder(decoder, tokens[:prompt], layout.position_ids, prefill)
    cache.lengths = cache.lengths + prompt
    states = []
    for token in tokens[prompt:]:
        step = Decoding.of(cache)
        states.append(run_decoder(decoder, token[None], step.places[None], step))
        cache.advance()
    return torch.cat(states)
