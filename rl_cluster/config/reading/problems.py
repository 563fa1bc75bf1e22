"""What is wrong with a configuration: problems in, one BadInputError that lists them all out."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_cluster.errors import BadInputError

NO_VALUE = object()


@dataclass(frozen=True)
class Problem:
    """field: dotted path. value: what was given, or NO_VALUE. remedy: what to write instead."""

    field: str
    value: Any
    reason: str
    remedy: str

    def __str__(self) -> str:
        given = "" if self.value is NO_VALUE else f" = {show(self.value)}"
        return f"{self.field}{given}: {self.reason}. {self.remedy}"


def show(value: Any, limit: int = 80) -> str:
    """The value as the user would write it in YAML's flow style, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def refuse(problems: Iterable[Problem], source: str = "") -> None:
    """Raise BadInputError with one line per problem; return if there is none."""
    lines = [str(problem) for problem in problems]
    if not lines:
        return
    where = f" in {source}" if source else ""
    if len(lines) == 1:
        raise BadInputError(f"bad configuration{where}: {lines[0]}")
    body = "\n".join(f"  - {line}" for line in lines)
    raise BadInputError(f"bad configuration{where}, {len(lines)} problems:\n{body}")


def nearest(word: str, candidates: Sequence[str]) -> str | None:
    """The candidate most like `word`, if any is at all."""
    found = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return found[0] if found else None
