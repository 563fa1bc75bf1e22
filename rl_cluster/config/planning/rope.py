"""A model's config as a mapping goes in; how long its sequences may be comes out. No torch.

Rotary positions of the types `longrope` and `dynamic` change all their frequencies once a sequence is longer
than some length. transformers looks at the longest of a call, vLLM at the longest that it may ever see, and
keys kept from before the change are of the old kind: beyond that length there is no one model to train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ROPES = ("rope_parameters", "rope_scaling")
ORIGINAL = "original_max_position_embeddings"
POSITION_NAMES = ("max_position_embeddings", ORIGINAL, *ROPES)
"""What this module reads."""


def positions(values: Mapping[str, Any]) -> int | None:
    """Tokens that a sequence may have: at most max_position_embeddings, and all with the same frequencies.
    None: the config does not say."""
    limits = [_whole(values.get("max_position_embeddings")), rope_switch(values)]
    return min((limit for limit in limits if limit is not None), default=None)


def rope_switch(values: Mapping[str, Any]) -> int | None:
    """The longest sequence whose rotary frequencies are those of every shorter one; None: no limit."""
    limits = [_switch(rope, values) for rope in _ropes(values)]
    return min((limit for limit in limits if limit is not None), default=None)


def named_in(config: Any) -> dict[str, Any]:
    """POSITION_NAMES of a config object of transformers (which may name it otherwise)."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return {name: getattr(text, name, None) for name in POSITION_NAMES}


def _ropes(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """rope_parameters of today, rope_scaling of older configs; for all layers, or per kind of layer."""
    for name in ROPES:
        rope = values.get(name)
        if isinstance(rope, Mapping):
            yield from (part for part in (rope, *rope.values()) if isinstance(part, Mapping))


def _switch(rope: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    kind = str(rope.get("rope_type") or rope.get("type") or "")
    trained = _whole(values.get("max_position_embeddings"))
    if "dynamic" in kind:
        return trained
    if kind not in ("longrope", "su"):
        return None
    return _whole(values.get(ORIGINAL)) or _whole(rope.get(ORIGINAL)) or trained


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
