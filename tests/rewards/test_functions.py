from __future__ import annotations

import asyncio
import threading
from decimal import Decimal
from typing import Any

import pytest

from rl_cluster.config.data import ReasoningGymSource
from rl_cluster.data.gym_families import make_gym_rows
from rl_cluster.rewards.functions import exact_match, last_number, math_match, reasoning_gym_score


def score(function: Any, responses: list[str], answer: Any, **options: Any) -> list[float]:
    return function(["?"] * len(responses), responses, [{"answer": answer}] * len(responses), **options)


def test_exact_match_ignores_white_space_around_the_response_and_nothing_else() -> None:
    responses = ["42", " 42\n", "42.", "4 2", "042", ""]
    assert score(exact_match, responses, "42") == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert score(exact_match, ["42"], 42) == [1.0]


def test_exact_match_takes_the_answer_from_the_column_named() -> None:
    assert exact_match(["?"], ["7"], [{"result": "7"}], answer_key="result") == [1.0]
    with pytest.raises(KeyError, match="answer"):
        exact_match(["?"], ["7"], [{"result": "7"}])


def test_the_last_number_counts_as_a_number() -> None:
    responses = ["12 + 30 is 42", "42.0", "41 or 42?", "42 or 41", "no", "1,042 - 1,000 = 42"]
    assert score(exact_match, responses, "42", extract="last_number") == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert score(exact_match, ["it is -7"], "-7", extract="last_number") == [1.0]
    with pytest.raises(ValueError, match="contains no number"):
        score(exact_match, ["7"], "seven", extract="last_number")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5-3", "3"),
        ("5 -3", "-3"),
        ("= -3.50", "-3.50"),
        ("1,234,567.5!", "1234567.5"),
        ("a 7th", "7"),
        ("x2", "2"),
        ("3.", "3"),
        ("(12)", "12"),
    ],
)
def test_numbers_are_found_as_a_reader_would(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_a_text_without_digits_has_no_number() -> None:
    assert last_number("none, - at . all") is None


MATH_RESPONSES = ["$\\frac{1}{2}$", "The answer is 0.5", "\\boxed{2/4}", "1/3", "no idea", ""]


def test_math_accepts_what_is_equal() -> None:
    assert score(math_match, MATH_RESPONSES, "\\frac{1}{2}") == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert score(math_match, ["$x^2+2x+1$", "$(x+1)^3$"], "$(x+1)^2$") == [1.0, 0.0]


def test_math_works_in_a_thread_where_signals_do_not() -> None:
    async def in_thread() -> list[float]:
        assert threading.current_thread() is threading.main_thread()
        return await asyncio.to_thread(score, math_match, MATH_RESPONSES, "1/2")

    assert asyncio.run(in_thread()) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_an_answer_that_is_no_mathematics_is_an_error_not_a_score() -> None:
    with pytest.raises(ValueError, match="the right answer '' is not a mathematical expression"):
        score(math_match, ["1"], "")


def test_a_familys_own_scorer_reads_the_answer_in_or_without_tags() -> None:
    source = ReasoningGymSource(source="reasoning_gym", family="chain_sum", size=1)
    ((row,), _) = make_gym_rows(source, 0)
    answer = row.metadata["answer"]
    responses = [answer, f"so <answer> {answer} </answer>.", f"<answer>{int(answer) + 1}</answer>", "none"]
    assert reasoning_gym_score(["?"] * 4, responses, [row.metadata] * 4) == [1.0, 1.0, 0.0, 0.0]
