"""Texts and a tokenizer in, padded token ids and their mask out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from rl_cluster.errors import BadInputError


def padding_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer, or, where it cannot pad, a copy that pads with its end token (the mask leaves it out).

    Raises BadInputError for something that is no tokenizer, or has neither token.
    """
    if not callable(tokenizer):
        raise BadInputError(
            f"tokenizer={tokenizer!r:.60}: give a tokenizer, such as AutoTokenizer.from_pretrained(name)."
        )
    if getattr(tokenizer, "pad_token_id", None) is not None:
        return tokenizer
    if getattr(tokenizer, "eos_token", None) is None:
        raise BadInputError(
            f"tokenizer={type(tokenizer).__name__}: has neither a pad nor an end token to pad with; set "
            "tokenizer.pad_token."
        )
    padding = copy.deepcopy(tokenizer)
    padding.pad_token = padding.eos_token
    return padding


def encode(
    texts: Sequence[str], tokenizer: Any, max_length: int, vocabulary_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, attention_mask) [B, L] of texts with the tokenizer's own special tokens and padding side.

    Longer texts are cut to max_length tokens at the tokenizer's truncation_side. Raises BadInputError for a
    text without tokens, and for ids outside the model's vocabulary.
    """
    encoded = tokenizer(
        list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt"
    )
    ids, mask = encoded["input_ids"].long(), encoded["attention_mask"]
    for text, size in zip(texts, mask.sum(dim=1).tolist(), strict=True):
        if not size:
            raise BadInputError(f"texts: {text!r:.60} has no tokens with this tokenizer; leave it out.")
    if vocabulary_size is not None and int((ids * mask.long()).max()) >= vocabulary_size:
        raise BadInputError(
            f"tokenizer={type(tokenizer).__name__}: makes token {int(ids.max())}, the base model knows "
            f"{vocabulary_size}; use the base model's own tokenizer, or resize its embeddings."
        )
    return ids, mask
