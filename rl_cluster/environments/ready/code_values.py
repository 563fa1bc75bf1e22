"""What the process that ran code wrote in; a checked result per call out. Whatever it is, nothing raises."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 60


@dataclass(frozen=True)
class CallResult:
    """value: what the call returned, None unless ok. error: why not ok: an exception, "timeout", "died", …"""

    ok: bool
    value: Any = None
    error: str = ""


class NotPlainError(ValueError):
    """Text that is no typed value."""


def read_results(written: bytes, token: str, num_calls: int, ending: str) -> list[CallResult]:
    """One per call, in order. ending: how the process ended, "" if by itself.

    A line without the token is not the harness's, and ignored. One that has it and is malformed, names a call
    that is not there or comes twice was forged: every call fails.
    """
    found: dict[int, CallResult] = {}
    lines = written.split(b"\n")[:-1]  # the last is empty, or cut off
    for line in lines:
        begin = token.encode() + b" "
        if not line.startswith(begin):
            continue
        try:
            index, result = _read_line(line[len(begin) :])
            if index in found or not -1 <= index < num_calls:
                raise NotPlainError("a result that nobody asked for")
        except (ValueError, TypeError, RecursionError, MemoryError, OverflowError):
            return [CallResult(False, error="the results were tampered with")] * num_calls
        found[index] = result
    if -1 in found and not found[-1].ok:
        return [found[-1]] * num_calls
    missing = CallResult(False, error=ending or "the code ended the process")
    return [found.get(index, missing) for index in range(num_calls)]


def _read_line(line: bytes) -> tuple[int, CallResult]:
    fields = json.loads(line, parse_constant=_refuse, parse_float=_refuse)
    if type(fields) is not list or len(fields) != 3:
        raise NotPlainError("not [index, value, error]")
    index, value, error = fields
    if type(index) is not int or type(error) is not str:
        raise NotPlainError("not [index, value, error]")
    if value is None:
        return index, CallResult(False, error=error)
    return index, CallResult(True, read_value(value))


def _refuse(text: str) -> Any:
    raise NotPlainError(f"{text} is no typed value")


def read_value(typed: Any, depth: int = 0) -> Any:
    """The value of the child's `typed`; NotPlainError (a ValueError) or TypeError for anything else."""
    if type(typed) is not list or not typed or depth > MAX_DEPTH:
        raise NotPlainError("not [type, value]")
    name, parts = typed[0], typed[1:]
    if name == "N" and not parts:
        return None
    if name in SCALARS and len(parts) == 1 and type(parts[0]) is SCALARS[name][0]:
        return SCALARS[name][1](parts[0])
    if name == "complex" and [type(part) for part in parts] == [str, str]:
        return complex(_finite(parts[0]), _finite(parts[1]))
    if name not in CONTAINERS or len(parts) != 1 or type(parts[0]) is not list:
        raise NotPlainError(f"{name!r:.40} is no type of a plain value")
    if name == "dict":
        return {read_value(key, depth + 1): read_value(value, depth + 1) for key, value in parts[0]}
    return CONTAINERS[name](read_value(item, depth + 1) for item in parts[0])


def _finite(text: str) -> float:
    value = float.fromhex(text)
    if not math.isfinite(value):
        raise NotPlainError(f"{text} is not finite")
    return value


def _integer(text: str) -> int:
    return int(text, 16)


SCALARS: dict[Any, tuple[type, Callable[[Any], Any]]] = {
    "bool": (bool, bool),
    "str": (str, str),
    "int": (str, _integer),
    "float": (str, _finite),
    "bytes": (str, bytes.fromhex),
}
"""name -> the JSON type that carries it, and how it is read."""

CONTAINERS: dict[Any, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "dict": dict}


def same_value(value: Any, expected: Any) -> bool:
    """Equal and of the same type, in all depths: True is not 1, and a tuple is no list."""
    if type(value) is not type(expected):
        return False
    if isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same_value(value[k], v) for k, v in expected.items())
    return bool(value == expected)
