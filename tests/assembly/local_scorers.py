"""Reward functions of the local runs, by import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def echo(
    prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1 where the response begins with the last digit of the prompt `a+b=`."""
    return [float(r.startswith(p[-2])) for p, r in zip(prompts, responses, strict=True)]


def digits(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float]:
    """The share of digits in the response."""
    return [sum(c.isdigit() for c in r) / max(1, len(r)) for r in responses]
