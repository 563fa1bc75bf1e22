"""docs/seed_features.md: every test and example that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_seed_documents import blocks_of

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (?P<item>.+?) \| (?P<tests>.+?) \| (?P<example>.*?) ?\|$", re.MULTILINE)


def rows() -> list[tuple[str, list[str], str]]:
    """(item, tests, example) of every row; the heads and rules of the tables left out."""
    page = (ROOT / "docs" / "seed_features.md").read_text(encoding="utf-8")
    found = []
    for match in ROW.finditer(page):
        item, tests = match["item"], match["tests"]
        if item != "Item" and not item.startswith("---"):
            found.append((item, tests.split("<br>"), match["example"].strip("`")))
    return found


def functions_of(path: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def test_the_table_covers_the_chapters_of_the_interface() -> None:
    assert len(rows()) >= 110


def test_every_test_that_is_named_exists() -> None:
    named = [test.strip("`") for _, tests, _ in rows() for test in tests]
    for file in {name.partition("::")[0] for name in named}:
        there = functions_of(ROOT / "tests" / file)
        wanted = {name.partition("::")[2] for name in named if name.startswith(file + "::")}
        assert wanted <= there, (file, sorted(wanted - there))


@pytest.mark.parametrize("kind", ["page", "block"])
def test_every_example_that_is_named_exists(kind: str) -> None:
    examples = {example for _, _, example in rows() if example and ("#" in example) == (kind == "block")}
    assert examples
    for example in examples:
        document, _, number = example.partition("#")
        if kind == "page":
            assert (ROOT / "docs" / document).is_file(), example
            continue
        assert int(number) < len(blocks_of(document)), example
