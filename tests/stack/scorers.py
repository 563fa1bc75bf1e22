"""Reward functions of the stack tests, named in their configurations by import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def share_of_digits(
    prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """The share of digits among the characters, and as a component the length."""
    del prompts, metadata
    return [{"score": sum(c.isdigit() for c in text) / 6, "length": float(len(text))} for text in responses]


def broken(
    prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Raises for every group."""
    raise ZeroDivisionError(f"cannot score {len(responses)} responses")
