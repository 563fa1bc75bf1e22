"""A model in half precision stands in float32 for a while, with its first layers only: so a small leak
between sequences cannot hide behind rounding. Afterwards every weight is what it was, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

MOST_BYTES = 8 * 2**30
"""That the copies in float32 may take; a model that needs more stays as it is."""
HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_full_precision(lm: nn.Module, decoder: nn.Module) -> Iterator[bool]:
    """Whether the model is in float32 inside: not where it is no model in half precision, or too large."""
    name, layers = _layers(decoder)
    kept = layers[: _enough(decoder, layers)]
    if name:
        setattr(decoder, name, kept)
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        possible = _is_possible(lm)
        if possible:
            for tensor in _tensors(lm):
                if tensor.dtype in HALF:
                    originals.append((tensor, tensor.data))
                    tensor.data = tensor.data.float()
        yield possible
    finally:
        for tensor, data in originals:
            tensor.data = data
        if name:
            setattr(decoder, name, layers)


def _is_possible(lm: nn.Module) -> bool:
    tensors = list(_tensors(lm))
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    known = all(tensor.dtype in (*HALF, torch.float32) for tensor in floating)
    halves = [tensor for tensor in floating if tensor.dtype in HALF]
    # Numbers that are no floats and no parameters of counting are of a quantisation.
    quantised = any(not p.is_floating_point() for p in lm.parameters())
    return known and not quantised and bool(halves) and 4 * sum(t.numel() for t in halves) <= MOST_BYTES


def _tensors(lm: nn.Module) -> Iterator[torch.Tensor]:
    yield from lm.parameters()
    yield from lm.buffers()


def _layers(decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    """The decoder's own list of layers, the longest that it has; "" and nothing if it has none."""
    lists = [(name, part) for name, part in decoder.named_children() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda pair: len(pair[1]), default=("", nn.ModuleList()))


def _enough(decoder: nn.Module, layers: nn.ModuleList) -> int:
    """So many first layers, at least two, that each kind of layer is among them."""
    config: Any = getattr(decoder, "config", None)
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    seen, enough = set(), 2
    for number, layer in enumerate(layers):
        kind = (kinds[number] if number < len(kinds) else None, _kind(layer))
        if kind not in seen:
            seen.add(kind)
            enough = max(enough, number + 1)
    return enough


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What tells layers apart: their parts, and the names, switches and windows that these hold."""
    return tuple(
        (
            name,
            type(part),
            tuple(
                (key, value)
                for key, value in sorted(vars(part).items())
                if isinstance(value, str | bool) or ("window" in key and isinstance(value, int | None))
            ),
        )
        for name, part in layer.named_modules()
    )
