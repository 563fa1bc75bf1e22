"""What a user's code raised or returned in; text about it out, whatever its own __str__ and __repr__ do."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 2000


def error_text(error: BaseException) -> str:
    """`Type: message`, printable and of bounded length."""
    return _printable(f"{_name(error)}: {_attempt(lambda: str(error))}", MAX_CHARACTERS)


def traceback_text(error: BaseException) -> str:
    """The error's own traceback; its end, where it is very long."""
    return _printable(_attempt(lambda: "".join(traceback.format_exception(error))), -10 * MAX_CHARACTERS)


def value_text(value: Any, limit: int = 40) -> str:
    """`type repr`, the repr cut to so many characters."""
    return f"{_name(value)} {repr_text(value, limit)}"


def repr_text(value: Any, limit: int = 40) -> str:
    """The repr, cut to so many characters."""
    return _printable(_attempt(lambda: repr(value)), limit)


def _name(value: Any) -> str:
    return _printable(type.__getattribute__(type(value), "__name__"), 100)


def _attempt(make: Callable[[], str]) -> str:
    try:
        return make()
    except BaseException as error:  # noqa: BLE001 — it is the text of a failure already
        return f"<no text: making it raised {_name(error)}>"


def _printable(text: str, limit: int) -> str:
    """The first (below 0: the last) so many characters, without what no encoding can write."""
    cut = text[:limit] if limit >= 0 else text[limit:]
    return cut.encode("utf-8", "backslashreplace").decode("utf-8")
