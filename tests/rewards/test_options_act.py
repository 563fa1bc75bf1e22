"""Every option of every kind of scorer changes what the scorer does, also of a kind that is added later."""

from __future__ import annotations

import asyncio
import sys
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import pytest
import torch

from rl_cluster.config.reward import (
    COMMON_FIELDS,
    CallableScorer,
    EnvironmentScorer,
    ExactMatchScorer,
    FunctionScorer,
    MathScorer,
    ReasoningGymScorer,
    RewardModelScorer,
    ScorerConfig,
)
from rl_cluster.rewards.answers import read_answer
from rl_cluster.rewards.calling import score_groups
from rl_cluster.rewards.loading import make_function, own_fields
from rl_cluster.rewards.local_scorer import LocalScorer
from rl_cluster.trajectory import ScoreFailure, Scores

METADATA = [{"answer": "42", "other": "7", "city": "Paris"}]

ACTING: list[tuple[ScorerConfig, ScorerConfig, str]] = [
    (ExactMatchScorer(), ExactMatchScorer(answer_key="other"), "7"),
    (ExactMatchScorer(), ExactMatchScorer(extract="last_number"), "It is 42"),
    (MathScorer(), MathScorer(answer_key="other"), "7"),
    (MathScorer(answer_key="city"), MathScorer(answer_key="city", unreadable="exact_text"), "paris"),
    (
        FunctionScorer(function="tests.rewards.test_options_act:constant"),
        FunctionScorer(function="tests.rewards.test_options_act:other_constant"),
        "",
    ),
    (
        FunctionScorer(function="tests.rewards.test_options_act:constant"),
        FunctionScorer(function="tests.rewards.test_options_act:constant", options={"value": 3.0}),
        "",
    ),
]
ELSEWHERE = {
    "function.num_workers": "tests/actors: the Ray scorer's limits",
    "function.groups_per_call": "tests/actors: the Ray scorer's limits",
}
"""Options that a function never sees, and where they are shown to act."""


def constant(prompts: Any, responses: Any, metadata: Any, value: float = 1.0) -> list[float]:
    return [value] * len(responses)


def other_constant(prompts: Any, responses: Any, metadata: Any) -> list[float]:
    return [2.0] * len(responses)


def outcome(config: ScorerConfig, response: str) -> Any:
    try:
        return make_function(config)(["?"], [response], METADATA)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("plain", "changed", "response"), ACTING)
def test_an_option_changes_the_score(plain: ScorerConfig, changed: ScorerConfig, response: str) -> None:
    assert outcome(plain, response) != outcome(changed, response)


def test_no_option_of_a_function_like_kind_is_left_out() -> None:
    shown = {
        f"{changed.kind}.{name}"
        for plain, changed, _ in ACTING
        for name in type(changed).model_fields
        if getattr(plain, name) != getattr(changed, name)
    }
    kinds = get_args(get_args(ScorerConfig)[0])
    others = {RewardModelScorer, CallableScorer, EnvironmentScorer}
    assert others | {ExactMatchScorer, MathScorer, FunctionScorer, ReasoningGymScorer} == set(kinds)
    fields = {
        f"{kind.model_fields['kind'].default}.{name}"
        for kind in set(kinds) - others
        for name in set(kind.model_fields) - COMMON_FIELDS - {"kind"}
    }
    assert fields == shown | set(ELSEWHERE)


class StartsWithScorer(ExactMatchScorer):
    kind: Literal["starts_with"] = "starts_with"  # type: ignore[assignment]
    letters: int = 1
    reward: float = 1.0
    built_in: ClassVar[str | None] = f"{__name__}:starts_with"


def starts_with(
    prompts: Any, responses: Any, metadata: Any, *, answer_key: str, extract: str, letters: int, reward: float
) -> list[float]:
    return [
        reward * (r[:letters] == row[answer_key][:letters])
        for r, row in zip(responses, metadata, strict=True)
    ]


def test_all_fields_of_a_new_kind_reach_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(starts_with=starts_with))
    config = StartsWithScorer(letters=2, reward=0.5, weight=3.0, name="mine")
    assert own_fields(config) == {"answer_key": "answer", "extract": "all", "letters": 2, "reward": 0.5}
    assert make_function(config)(["?", "?"], ["42!", "4!"], METADATA * 2) == [0.5, 0.0]


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Odd:
    def __float__(self) -> float:
        raise MuteError

    def __repr__(self) -> str:
        raise MuteError


@pytest.mark.parametrize(
    ("answer", "values"),
    [
        (torch.tensor([1.0, 2.0], requires_grad=True), [1.0, 2.0]),
        ([torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, dtype=torch.bfloat16)], [1.0, 2.0]),
        ([Decimal("0.5"), Fraction(1, 4)], [0.5, 0.25]),
        ([True, np.float32(3)], [1.0, 3.0]),
        ([3e38, -3e38], [3e38, -3e38]),
    ],
)
def test_numbers_of_any_make_are_scores(answer: Any, values: list[float]) -> None:
    (scores,) = read_answer("f", answer, (2,), 0.0)
    assert isinstance(scores, Scores)
    assert scores.values.tolist() == values


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        ([1e308, 0.0], "not_finite", "returned 1e+308 for sample 0, beyond ±3.4e+38"),
        ([0.0, 10**39], "not_finite", "for sample 1, beyond"),
        ([{"a": 3e38, "b": 3e38}, {"a": 0, "b": 0}], "not_finite", "beyond"),
        ([Odd(), 1.0], "raised", "<no text: making it raised MuteError>"),
        ((x for x in (1.0, 2.0)), "raised", "returned generator, but a list of 2 numbers"),
        ({1.0, 2.0}, "raised", "returned set"),
        (torch.tensor(1.0), "raised", "returned Tensor"),
        (np.array(1.0), "raised", "returned ndarray"),
        ([[1.0], [2.0]], "raised", "not a number"),
        ([None, 1.0], "raised", "NoneType None for sample 0, not a number"),
        ([1 + 2j, 1.0], "raised", "not a number"),
    ],
)
def test_what_is_no_score_is_a_failure_with_the_scorers_name(answer: Any, kind: str, told: str) -> None:
    (failure,) = read_answer("mine", answer, (2,), 0.0)
    assert isinstance(failure, ScoreFailure)
    assert (failure.name, failure.kind) == ("mine", kind)
    assert told in failure.message


RAISED = [
    MuteError(),
    SystemExit(0),
    KeyboardInterrupt(),
    BaseException("odd"),
    GeneratorExit(),
    StopIteration(),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_a_function_raises_is_a_failure(make_group: Any, error: BaseException) -> None:
    def raises(prompts: Any, responses: Any, metadata: Any) -> list[float]:
        raise error

    async def later(prompts: Any, responses: Any, metadata: Any) -> list[float]:
        raise error

    group = make_group("1+1=", ["2"])
    outcomes = [asyncio.run(LocalScorer("mine", raises).score(group))]
    if not isinstance(error, GeneratorExit | StopIteration):  # of a coroutine these mean its end
        outcomes += [asyncio.run(LocalScorer("mine", later).score(group))]
        outcomes += score_groups("mine", raises, [group])
    for outcome in outcomes:
        assert isinstance(outcome, ScoreFailure)
        assert (outcome.name, outcome.kind) == ("mine", "raised")
        assert type(error).__name__ in outcome.message
