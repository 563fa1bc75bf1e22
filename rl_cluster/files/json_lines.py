"""JSONL: bytes in, lines and objects out. Lines end at "\\n" only; other ends of lines are text to JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.errors import BadInputError


@dataclass(frozen=True)
class BadLine:
    """reason: in words for the user."""

    reason: str


ROW_FILE = "metrics.json"
"""In a checkpoint: its step's line of metrics.jsonl, without what is measured after the checkpoint."""


def row_text(step: int, metrics: Mapping[str, float | None]) -> str:
    """A line of metrics.jsonl, of now, without its end. JSON has no NaN and no infinity: null."""
    return json.dumps({"step": step, "time": time.time(), **{k: finite(v) for k, v in metrics.items()}})


def finite(value: float | None) -> float | None:
    """None for NaN and the infinities."""
    return value if value is None or math.isfinite(value) else None


def split_lines(data: bytes) -> list[bytes]:
    """Without their ends; an end of line after the last does not begin another."""
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def parse_object(line: bytes) -> dict[str, Any] | BadLine:
    """One line as an object, or why it is none."""
    if not line.strip():
        return BadLine("empty line")
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadLine(f"not UTF-8 (byte {error.start + 1} of the line)")
    except (ValueError, RecursionError) as error:
        return BadLine(f"not JSON: {error}")
    if not isinstance(value, dict):
        return BadLine(f"a JSON {type(value).__name__}, but an object {{…}} is needed")
    return value


def read_steps(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(line with its end, object) for each line of a file of a run, which have a whole number `step` each.

    The line that a crash cut short (the last, without its end) is left out. Raises BadInputError for any
    other that is no such object, with file, line and remedy.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(
            f"{path}: cannot be read: {error}. Restore it from a copy, or move it away."
        ) from error
    lines = split_lines(data)
    for number, line in enumerate(lines, start=1):
        row = parse_object(line)
        is_cut = number == len(lines) and not data.endswith(b"\n")
        if isinstance(row, dict) and not _is_step(row.get("step")):
            row = BadLine(f"its step is {row.get('step')!r:.40}, but a whole number is needed")
        if isinstance(row, dict):
            yield line + b"\n", row
        elif not is_cut:
            raise BadInputError(
                f"{path}:{number}: {row.reason}. The file was damaged or changed by hand: restore it from a "
                "copy, or delete the line."
            )


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
