"""What a model says of its own attention: whether another may take its place, what mixes tokens besides."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", "mlp", "moe"})
"""Kinds of layers, by the names of transformers' configs, that keep packed sequences apart."""


def mixes_tokens(lm: Any, decoder: nn.Module) -> str:
    """Which of its parts certainly mix tokens besides attention; nothing if none is known to."""
    config = lm.config
    text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    kinds = getattr(text_config, "layer_types", None) or ()
    others = sorted({str(kind) for kind in kinds} - ATTENTION_LAYERS)
    if others:
        return f"it has layers of {', '.join(others)}"
    return "it has convolutions" if any(isinstance(m, nn.Conv1d) for m in decoder.modules()) else ""


def set_attention(lm: PreTrainedModel, name: str) -> bool:
    """Whether the whole model has it now."""
    try:
        lm.set_attn_implementation(name)
    except (ValueError, ImportError):
        return False
    return all(m.config._attn_implementation == name for m in lm.modules() if isinstance(m, PreTrainedModel))
