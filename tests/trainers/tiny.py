"""A one-layer model over digits, for tests that really train."""

from __future__ import annotations

from typing import Any

from rl_cluster.config.run import ScratchModel
from rl_cluster.modeling.scratch import build_model, build_tokenizer

SCRATCH = ScratchModel(
    alphabet="0123456789=+ ",
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    intermediate_size=64,
    max_positions=32,
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def tiny_model(seed: int = 0) -> tuple[Any, Any]:
    """(model, tokenizer); the tokenizer renders chat messages as their contents and `=`."""
    tokenizer = build_tokenizer(SCRATCH.alphabet, SCRATCH.max_positions, CHAT_TEMPLATE)
    return build_model(SCRATCH, len(tokenizer), seed), tokenizer
