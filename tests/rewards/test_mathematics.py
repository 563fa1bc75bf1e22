"""Mathematics is read in a limited child: traps are wrong answers, references are checked at the start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from rl_cluster.config.reward import ExactMatchScorer, MathScorer
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.functions import math_match, text_match
from rl_cluster.rewards.loading import check_metadata, make_function
from rl_cluster.rewards.local_scorer import LocalScorer
from rl_cluster.rewards.mathematics import MathChild, Unreadable
from rl_cluster.trajectory import Prompt

QUICK = 0.3
"""Seconds of processor time per item, in these tests."""


@pytest.fixture(scope="module")
def child() -> Any:
    made = MathChild(seconds=QUICK)
    yield made
    made.close()


def is_readable(child: MathChild, answer: str) -> bool:
    return child.unreadable([answer]) == []


TRAPS = [
    "$9^{999999999}$",
    "$10^{10^{10}}$",
    "$((9!)!)!$",
    "$\\binom{10^9}{5*10^8}$",
    "$" + "(" * 3000 + "1" + ")" * 3000 + "$",
    "$" + "9" * 200_000 + "$",
    "\\boxed{" * 3000,
    "\0",
    "\ud800",
    "",
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: ascii(trap[:12]))
def test_a_response_that_cannot_be_evaluated_is_wrong_and_the_others_are_not_disturbed(
    child: MathChild, trap: str
) -> None:
    assert child.check([("42", "$42$"), ("42", trap), ("1/2", "0.5"), ("1/2", "0.6")]) == [
        True,
        False,
        True,
        False,
    ]


def test_a_division_by_zero_is_a_wrong_answer_and_a_batch_of_nothing_but_traps_ends(child: MathChild) -> None:
    assert child.check([("42", "$\\frac{1}{0}$")]) == [False]
    assert child.check([("42", TRAPS[0])] * 12 + [("42", "42")]) == [False] * 12 + [True]


def test_a_child_that_was_killed_is_replaced(child: MathChild) -> None:
    assert child.check([("42", "42")]) == [True]
    before = child.pid
    os.kill(before, signal.SIGKILL)
    assert child.check([("42", "42"), ("42", "43")]) == [True, False]
    assert child.pid != before


def test_threads_share_the_child_and_each_gets_its_own_answers(child: MathChild) -> None:
    found: dict[int, list[Any]] = {}

    def ask(number: int) -> None:
        found[number] = child.check([(str(number), str(number)), (str(number), str(number + 1))])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [True, False] for number in range(6)}


def test_a_process_that_compares_answers_ends_by_itself_and_leaves_no_child() -> None:
    program = (
        "from rl_cluster.rewards.mathematics import OF_THIS_PROCESS as child\n"
        "assert child.check([('1', '1')]) == [True]\nprint(child.pid)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


READABLE = [
    "42",
    "-7/3",
    "3.50",
    "1,234",
    "10\\%",
    "\\$18.90",
    "$\\frac{1}{2}$",
    "\\frac43",
    "2\\sqrt{3}",
    "x^2 + 1",
    "(2, 3)",
    "[0, 1)",
    "\\{1,2\\}",
    "\\pi",
    "C",
    "(B)",
    "\\text{(A)}",
    "x=3",
    "sqrt(2)",
    "sin(x)",
    "5 apples",
    "12 cm",
    "#### 42",
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
    "$Paris$",
]


@pytest.mark.parametrize("answer", READABLE)
def test_what_is_mathematics_is_read_and_equals_itself_in_every_form(child: MathChild, answer: str) -> None:
    assert is_readable(child, answer)
    forms = [answer]
    if "$" not in answer and "#" not in answer:
        forms += [f"\\boxed{{{answer}}}", f"So the answer is ${answer}$."]
    assert child.check([(answer, form) for form in forms]) == [True] * len(forms)


UNREADABLE = ["Paris", "N/A", "x y z", "yes", "", " ", "$\\boxed{}$", "None", "nan", "True", "?", "...", "-"]
AMBIGUOUS = ["2x", "1e5", "5:30", "1 1/2", "2023-01-02", "$\\frac{1}{0}$", "$9^{999999999}$", "1 2 3"]


@pytest.mark.parametrize("answer", UNREADABLE + AMBIGUOUS)
def test_what_is_no_mathematics_or_read_as_something_else_is_refused_with_its_row(
    answer: str,
) -> None:
    tokens = np.array([1], dtype=np.int32)
    good = Prompt("train.jsonl:1", tokens, "?", {"answer": "1/2"})
    bad = Prompt("train.jsonl:2", tokens, "?", {"answer": answer})
    with pytest.raises(BadInputError) as caught:
        check_metadata([MathScorer()], [good, bad, good])
    message = str(caught.value)
    assert f"rewards.scorers (math): train.jsonl:2 has answer = {answer!r}" in message
    assert "1 of 3 rows" in message
    assert "unreadable=exact_text" in message
    check_metadata([MathScorer()], [good])
    check_metadata([MathScorer(unreadable="exact_text")], [good, bad])


def test_an_expression_is_not_mistaken_for_the_number_in_it(child: MathChild) -> None:
    pairs = [("2\\sqrt{3}", "2"), ("2\\sqrt{3}", "$2\\sqrt{3}$"), ("(-\\infty, 3]", "3"), ("2^{10}", "1024")]
    assert child.check(pairs) == [False, True, False, True]
    said = [("2\\sqrt{3}", "The answer is 2\\sqrt{3}."), ("x+1", "Answer: 1 + x")]
    assert child.check(said) == [True, True]


def test_with_exact_text_such_answers_are_compared_as_text() -> None:
    score = make_function(MathScorer(unreadable="exact_text"))
    responses = ["paris", "It is \\boxed{\\text{Paris}}", "Answer: Paris.", "London", "not Paris", ""]
    metadata = [{"answer": "Paris"}] * len(responses)
    assert score(["?"] * len(responses), responses, metadata) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert score(["?"], ["0.5"], [{"answer": "1/2"}]) == [1.0]
    assert not text_match("", "")


def test_references_that_no_last_number_could_equal_are_refused_too() -> None:
    row = Prompt("a:1", np.array([1], dtype=np.int32), "?", {"answer": "seven"})
    with pytest.raises(BadInputError, match="a:1 has answer = 'seven', which contains no number"):
        check_metadata([ExactMatchScorer(extract="last_number")], [row])


def test_a_reference_that_the_data_brings_later_is_an_error_of_its_own(child: MathChild) -> None:
    (verdict,) = child.check([("Paris", "Paris")])
    assert isinstance(verdict, Unreadable)
    with pytest.raises(ValueError, match="the right answer 'N/A' is not a mathematical expression"):
        math_match(["?"], ["1"], [{"answer": "N/A"}])


async def test_a_trap_does_not_freeze_the_local_scorer(make_group: Any) -> None:
    scorer = LocalScorer("math", make_function(MathScorer()), timeout_seconds=600.0)
    scores = await scorer.score(make_group("1+1=", ["42", TRAPS[0], "$\\frac{84}{2}$"], answer="42"))
    assert scores.values.tolist() == [1.0, 0.0, 1.0]
