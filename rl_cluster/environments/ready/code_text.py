"""A response in; its Python code, whether that parses, and how clean it is out."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import warnings

from rl_cluster.errors import BadInputError, ScorerError

STYLE_RULES = "E,W,F,N,B,C4,SIM,UP,RET,PIE"
"""The families of ruff rules that the style component counts."""
STYLE_PYTHON = "py311"
STYLE_TIMEOUT_SECONDS = 20.0
MAX_CODE_CHARACTERS = 100_000
"""Longer code counts as not parsing: nobody asked for it, and parsing costs time and memory."""

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def extract_code(response: str) -> str:
    """The last fenced block of a response (an unclosed one goes to the end); without one, all of it."""
    blocks = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def parses(code: str) -> bool:
    """Whether the code is Python with at least one statement. Nothing is executed."""
    if len(code) > MAX_CODE_CHARACTERS:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(ast.parse(code).body)
    # What the parser says to code that is wrong, has null bytes, or is nested too deeply.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def find_ruff() -> str:
    """The path of the ruff program. BadInputError, with the remedy, where it is not installed."""
    try:
        from ruff import find_ruff_bin

        return str(find_ruff_bin())
    except (ImportError, FileNotFoundError) as error:
        raise BadInputError(
            "components: 'style' needs the program ruff, which is not installed here. "
            f"Install it ({sys.executable} -m pip install ruff), or leave style out: "
            'components=("syntax", "tests").'
        ) from error


def style_score(code: str, ruff: str) -> float:
    """1 / (1 + number of ruff's findings), 0 for code that does not parse.

    ruff runs on standard input, without the user's configuration or a cache; it does not execute the code.
    ScorerError if it fails or takes too long: a program that did not answer is not a bad style.
    """
    if not parses(code):
        return 0.0
    command = [ruff, "check", "--isolated", "--no-cache", "--exit-zero", "--quiet"]
    command += ["--output-format=json", f"--select={STYLE_RULES}", "--stdin-filename=answer.py"]
    # The code has no say in what counts: neither by noqa comments nor by a requires-python of its own.
    command += ["--ignore-noqa", f"--target-version={STYLE_PYTHON}", "-"]
    source = code.rstrip() + "\n"
    try:
        done = subprocess.run(
            command, input=source.encode(), capture_output=True, timeout=STYLE_TIMEOUT_SECONDS, check=True
        )
        return 1.0 / (1.0 + len(json.loads(done.stdout)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ScorerError("style", f"{ruff} failed: {error}") from error
