from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from rl_cluster.config.reward import (
    ExactMatchScorer,
    FunctionScorer,
    MathScorer,
    ReasoningGymScorer,
    RewardModelScorer,
)
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.loading import check_metadata, load_function, make_function, scorer_names
from rl_cluster.trajectory import Prompt

SOURCE = """
from dataclasses import dataclass
import pickle

@dataclass
class Point:
    x: int

CONSTANT = 3

def lengths(prompts, responses, metadata, factor=1):
    assert pickle.loads(pickle.dumps(Point(1))) == Point(1)
    return [factor * len(r) for r in responses]

async def slowly(prompts, responses, metadata):
    return [0.5 for _ in responses]
"""


def test_a_function_is_found_by_module_and_by_file(tmp_path: Path) -> None:
    assert load_function("math:sqrt") is math.sqrt
    (tmp_path / "mine.py").write_text(SOURCE)
    assert load_function("mine.py:lengths", tmp_path)([], ["ab"], []) == [2]
    assert load_function(f"{tmp_path}/mine.py:lengths")([], ["ab"], []) == [2]
    assert asyncio.run(load_function("mine.py:slowly", tmp_path)([], ["a", "b"], [])) == [0.5, 0.5]


def test_modules_beside_the_user_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_user.py").write_text(SOURCE)
    assert load_function("beside_the_user:lengths", tmp_path)([], ["abc"], []) == [3]


def test_options_are_bound_as_keyword_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    config = FunctionScorer(function="mine.py:lengths", options={"factor": 10})
    assert make_function(config, tmp_path)([], ["ab"], []) == [20]
    exact = make_function(ExactMatchScorer(answer_key="a", extract="last_number"))
    assert exact(["?"], ["it is 7.0"], [{"a": "7"}]) == [1.0]
    assert make_function(MathScorer(answer_key="a"))(["?"], ["0.5"], [{"a": "1/2"}]) == [1.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sqrt", "write package.module:function"),
        ("math:", "write package.module:function"),
        (":sqrt", "write package.module:function"),
        ("math:not a name", "write package.module:function"),
        ("no_such_module_here:f", "failed with ModuleNotFoundError"),
        ("missing.py:f", "there is no file"),
        ("mine.py:length", r"'length' in mine.py is nothing, not a function. There are: Point, .*lengths"),
        ("mine.py:CONSTANT", "'CONSTANT' in mine.py is a int, not a function"),
        ("broken.py:f", "failed with ZeroDivisionError: division by zero"),
        ("syntax.py:f", "failed with SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused(tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "syntax.py").write_text("def f(:")
    with pytest.raises(BadInputError, match=message) as caught:
        load_function(spec, tmp_path)
    assert str(caught.value).startswith(f"rewards.scorers.function={spec!r}: ")


def test_names_default_to_the_kind_or_the_function_and_may_not_repeat() -> None:
    scorers = [
        FunctionScorer(function="a.b:brevity"),
        ExactMatchScorer(),
        RewardModelScorer(path="x", name="taste"),
    ]
    assert scorer_names(scorers) == ("brevity", "exact_match", "taste")
    with pytest.raises(BadInputError, match="more than one is called 'exact_match'"):
        scorer_names([ExactMatchScorer(), ExactMatchScorer(answer_key="b")])


def test_a_prompt_without_the_answer_is_refused_before_anything_starts() -> None:
    tokens = np.array([1], dtype=np.int32)
    good, bad = Prompt("a:1", tokens, "?", {"answer": "x"}), Prompt("a:2", tokens, "?", {"reply": "x"})
    check_metadata([ExactMatchScorer(), MathScorer(), FunctionScorer(function="math:sqrt")], [good])
    check_metadata([ExactMatchScorer(answer_key="reply")], [bad])
    with pytest.raises(
        BadInputError, match=r"\(exact_match\): a:2 has no 'answer' .* It has: reply\. Set answer_key"
    ):
        check_metadata([ExactMatchScorer()], [good, bad])
    with pytest.raises(BadInputError, match=r"\(reasoning_gym\): a:1 has no 'family'"):
        check_metadata([ReasoningGymScorer()], [good])
