"""A user's reward function in, checked; a function that calls it the right way and checks its answer out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from rl_cluster.errors import BadInputError
from rl_cluster.rewards.answers import LARGEST_SCORE
from rl_cluster.rewards.safe_text import repr_text

RewardFunction = Callable[..., float]
"""f(prompt, generated, full_text) -> float."""

NAMES = ("prompt", "generated", "full_text")


def reward_call(field: str, function: Any) -> Callable[[str, str, str], float]:
    """A function that calls the user's with keywords if it takes them by name, else by position.

    field: what to name in errors. BadInputError now if the function cannot be called with the three
    arguments, and at a call whose answer is no finite number.
    """
    if not callable(function):
        raise BadInputError(
            f"{field} is {type(function).__name__} {function!r:.60}: must be a function "
            "f(prompt, generated, full_text)."
        )
    by_name = _takes_names(field, function)

    def call(prompt: str, generated: str, full_text: str) -> float:
        values = (prompt, generated, full_text)
        answer = function(**dict(zip(NAMES, values, strict=True))) if by_name else function(*values)
        return finite_number(f"{field} returned", answer, prompt)

    return call


def _takes_names(field: str, function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature: they take positions
        return False
    if _binds(lambda: signature.bind(**dict.fromkeys(NAMES))):
        return True
    if _binds(lambda: signature.bind(*NAMES)):
        return False
    raise BadInputError(f"{field} takes {signature}: it must take (prompt, generated, full_text).")


def _binds(bind: Callable[[], object]) -> bool:
    try:
        bind()
    except TypeError:
        return False
    return True


def finite_number(what: str, answer: Any, prompt: str) -> float:
    """answer as a float; BadInputError if it is None, text, NaN, beyond float32 or more than one number."""
    try:
        value = float(answer) if not isinstance(answer, str | bytes) else math.nan
    except Exception:  # noqa: BLE001 — an object of the user's own may raise anything
        value = math.nan
    if not abs(value) <= LARGEST_SCORE:
        raise BadInputError(
            f"{what} {repr_text(answer, 60)} for the prompt {prompt!r:.60}: a finite number is needed."
        )
    return value
