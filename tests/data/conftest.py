"""A char-level tokenizer without a chat template, and one with."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from rl_cluster.modeling.scratch import build_tokenizer

ALPHABET = "0123456789+-*/=() ?abcdefghijklmnopqrstuvwxyz:"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(ALPHABET, 256)


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(ALPHABET, 256, TEMPLATE)
