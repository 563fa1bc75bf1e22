"""A model (folder or hub name) and its tokenizer in; the tokens that end its responses out."""

from __future__ import annotations

from typing import Any


def end_token_ids(model: str, tokenizer: Any) -> frozenset[int]:
    """Of its generation config, its config (chat models name several), and its tokenizer."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(model)
    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:  # it has none of its own
        generation = GenerationConfig.from_model_config(config)
    return joined_ids(generation.eos_token_id, config.get_text_config().eos_token_id, tokenizer.eos_token_id)


def joined_ids(*sources: int | list[int] | tuple[int, ...] | None) -> frozenset[int]:
    """Each a token id, several, or none."""
    ids: set[int] = set()
    for source in sources:
        ids |= set(source) if isinstance(source, list | tuple) else {source} if source is not None else set()
    return frozenset(ids)
