"""Programming problems in; BadInputError for one that no answer could pass, or every answer would, out."""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Sequence
from typing import Any

from rl_cluster.environments.ready.code_problems import CodeProblem, CodeTest
from rl_cluster.errors import BadInputError

MAX_DEPTH = 40
PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, set, dict)


def check_problems(problems: Sequence[Any]) -> None:
    """Each is a CodeProblem with a prompt of its own, and tests whose calls are expressions that use what the
    answer defines and whose expected values are plain, finite and of exactly these types."""
    seen: dict[str, int] = {}
    for number, problem in enumerate(problems):
        if not isinstance(problem, CodeProblem) or not problem.tests:
            raise BadInputError(
                f"problems[{number}]={problem!r:.60}: must be a CodeProblem with at least one test."
            )
        if problem.prompt in seen:
            raise BadInputError(
                f"problems[{number}]: has the prompt of problems[{seen[problem.prompt]}], and only one can "
                "be asked. Give each problem a prompt of its own."
            )
        seen[problem.prompt] = number
        for index, test in enumerate(problem.tests):
            field = f"problems[{number}].tests[{index}]"
            if not isinstance(test, CodeTest) or not isinstance(test.call, str):
                raise BadInputError(f"{field}={test!r:.60}: must be a CodeTest(call, expected).")
            _check_call(field, test.call)
            _check_expected(f"{field}.expected", test.expected, 0)


def _check_call(field: str, call: str) -> None:
    try:
        tree = ast.parse(call, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInputError(
            f"{field}.call={call!r:.80}: is no Python expression ({error}); no answer could pass it. Write "
            'a call such as "add(2, 3)".'
        ) from error
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(dir(builtins))
    if not own:
        raise BadInputError(
            f"{field}.call={call!r:.80}: uses nothing that an answer defines, so it says nothing about any. "
            'Write a call such as "add(2, 3)".'
        )


def _check_expected(field: str, value: Any, depth: int) -> None:
    remedy = "No answer could pass. Give plain Python values: numbers, text, lists, tuples, sets, dicts."
    if type(value) not in PLAIN:
        raise BadInputError(f"{field}={value!r:.60}: is of type {type(value).__name__}. {remedy}")
    if depth > MAX_DEPTH:
        raise BadInputError(f"{field}: is nested more than {MAX_DEPTH} deep. {remedy}")
    numbers = (value.real, value.imag) if isinstance(value, complex) else (value,)
    if isinstance(value, float | complex) and not all(map(math.isfinite, numbers)):
        raise BadInputError(f"{field}={value!r}: is not finite. {remedy}")
    items = [*value, *value.values()] if isinstance(value, dict) else value
    if isinstance(value, list | tuple | set | dict):
        for item in items:
            _check_expected(field, item, depth + 1)
