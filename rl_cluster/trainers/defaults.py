"""Documented defaults that read as their numbers and still tell that nobody gave them."""

from __future__ import annotations

from typing import Any


class Default(float):
    """The number of a setting that nobody has given. A given number of the same size is a plain float.

    Copies, pickles and dataclasses.replace keep the type, so what was not given stays not given.
    """

    def __reduce__(self) -> Any:
        return Default, (float(self),)


def is_given(value: Any) -> bool:
    """Whether the setting's value was written by the user, whatever its size."""
    return not isinstance(value, Default)
