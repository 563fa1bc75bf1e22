"""An argument of a Python function in, a BadInputError that names it out where it cannot work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rl_cluster.errors import BadInputError


def check_number(field: str, value: Any, above: float = -math.inf, at_least: float = -math.inf) -> None:
    """BadInputError unless value is a finite number > above and ≥ at_least."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= above or value < at_least:
        limit = f" above {above:g}" if above > -math.inf else ""
        limit = f" of at least {at_least:g}" if at_least > -math.inf else limit
        raise BadInputError(f"{field}={value!r}: must be a finite number{limit}.")


def check_whole_number(field: str, value: Any, at_least: int = 1) -> None:
    """BadInputError unless value is an int ≥ at_least."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise BadInputError(f"{field}={value!r}: must be a whole number of at least {at_least}.")


def check_texts(field: str, texts: Any, *, may_be_blank: bool = False) -> None:
    """BadInputError unless texts is a sequence of at least one string, none of them only white space."""
    if not isinstance(texts, Sequence) or isinstance(texts, str | bytes) or not len(texts):
        raise BadInputError(f"{field}={texts!r:.60}: give a list of at least one string.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadInputError(
                f"{field}[{index}]={text!r:.60}: must be a string, not {type(text).__name__}."
            )
        if not may_be_blank and not text.strip():
            raise BadInputError(f"{field}[{index}]={text!r:.60}: is empty; leave the row out.")
