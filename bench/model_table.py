"""Tiny models of many architectures are measured against plain transformers: the table of docs/models.md.

`python -m bench.model_table` rewrites it between its markers; the cases: tests/modeling/architectures.py.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import transformers

from tests.modeling.architectures import CASES, Outcome, measure

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- table: python -m bench.model_table -->\n", "<!-- end of the table -->\n"
HEAD = "| architecture | how | learner | local sampler |\n|---|---|---|---|\n"


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Markdown; differences rounded up to a power of ten's half."""
    lines = [f"transformers {transformers.__version__}, float32:\n\n", HEAD]
    for kind, outcome in outcomes.items():
        numbers = [_shown(x) for x in (outcome.learner, outcome.sampler)]
        lines.append(f"| `{kind}` | {outcome.way} | {numbers[0]} | {numbers[1]} |\n")
    return "".join(lines)


def _shown(difference: float | None) -> str:
    return "" if difference is None else f"{difference:.1e}"


def main() -> None:
    """Measure everything and rewrite the page's table."""
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {case.kind: measure(case, Path(folder) / case.kind) for case in CASES}
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + table(outcomes) + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
