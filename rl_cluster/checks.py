"""An argument of a Python function in, a BadInputError that names it out where it cannot work."""

from __future__ import annotations

import math
from typing import Any

from rl_cluster.errors import BadInputError


def check_number(field: str, value: Any, above: float = -math.inf, at_least: float = -math.inf) -> None:
    """BadInputError unless value is a finite number > above and ≥ at_least."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= above or value < at_least:
        limit = f" above {above:g}" if above > -math.inf else ""
        limit = f" of at least {at_least:g}" if at_least > -math.inf else limit
        raise BadInputError(f"{field}={value!r}: must be a finite number{limit}.")
