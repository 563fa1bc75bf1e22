from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_cluster.rewards.calling import read_answer, score_groups, score_groups_async
from rl_cluster.trajectory import ScoreFailure, Scores, TrajectoryGroup

MakeGroup = Callable[..., TrajectoryGroup]


def only(outcomes: list[Any]) -> Any:
    (outcome,) = outcomes
    return outcome


def test_the_function_sees_every_sample_with_its_prompt_and_metadata(make_group: MakeGroup) -> None:
    seen: list[Any] = []

    def function(prompts: list[str], responses: list[str], metadata: list[dict]) -> list[float]:
        seen.extend(zip(prompts, responses, metadata, strict=True))
        metadata[0]["answer"] = "spoilt"
        return [float(len(response)) for response in responses]

    groups = [make_group("1+1=", ["2", "33"], answer="2"), make_group("2+2=", ["444"], 1, answer="4")]
    first, second = score_groups("length", function, groups)
    assert [(prompt, response) for prompt, response, _ in seen] == [
        ("1+1=", "2"),
        ("1+1=", "33"),
        ("2+2=", "444"),
    ]
    assert [row["answer"] for _, _, row in seen] == ["spoilt", "2", "4"]
    assert groups[0].prompt.metadata["answer"] == "2"
    assert first.values.tolist() == [1.0, 2.0]
    assert second.values.tolist() == [3.0]
    assert first.name == "length"


def test_an_asynchronous_function_gives_the_same(make_group: MakeGroup) -> None:
    async def function(prompts: Any, responses: Any, metadata: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(response) for response in responses]

    group = make_group("1+1=", ["2", "3"])
    assert only(score_groups("f", function, [group])).values.tolist() == [2.0, 3.0]
    inside = asyncio.run(score_groups_async("f", function, [group]))
    assert only(inside).values.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    "answer",
    [[1, 0.5, True], (1.0, 0.5, 1.0), np.array([1.0, 0.5, 1.0]), torch.tensor([1.0, 0.5, 1.0])],
)
def test_any_sequence_of_numbers_will_do(answer: Any) -> None:
    outcome = only(read_answer("f", answer, (3,), 0.0))
    assert outcome.values.tolist() == [1.0, 0.5, 1.0]
    assert outcome.values.dtype == np.float64


def test_dicts_become_components_and_their_score_or_sum_the_value() -> None:
    summed = only(read_answer("f", [{"a": 1, "b": 2.5}, {"b": 4, "a": 0}], (2,), 0.0))
    assert summed.values.tolist() == [3.5, 4.0]
    assert {key: values.tolist() for key, values in summed.components.items()} == {
        "a": [1.0, 0.0],
        "b": [2.5, 4.0],
    }
    own = only(read_answer("f", [{"a": 1, "score": 9}], (1,), 0.0))
    assert own.values.tolist() == [9.0]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ([1.0, 2.0], "wrong_length", "returned 2 scores for 3 responses"),
        ([1.0, 2.0, 3.0, 4.0], "wrong_length", "returned 4 scores for 3 responses"),
        ([], "wrong_length", "returned 0 scores for 3 responses"),
        ([1.0, float("nan"), 2.0], "not_finite", "returned nan for sample 1"),
        ([1.0, 2.0, float("-inf")], "not_finite", "returned -inf for sample 2"),
        ([{"a": 1.0}, {"a": float("inf")}, {"a": 0}], "not_finite", "returned inf for sample 1"),
        (None, "raised", "returned NoneType, but a list of 3 numbers"),
        (1.0, "raised", "returned float, but a list of 3 numbers"),
        ("abc", "raised", "returned str, but a list of 3 numbers"),
        ({"score": 1}, "raised", "returned dict, but a list of 3 numbers"),
        ([1.0, None, 2.0], "raised", "NoneType None for sample 1, not a number"),
        ([1.0, "2", 2.0], "raised", "str '2' for sample 1, not a number"),
        ([1.0, {"a": 1}, 2.0], "raised", "dict {'a': 1} for sample 1, not a number"),
        (np.ones((3, 2)), "raised", "ndarray array([1., 1.]) for sample 0, not a number"),
        ([{"a": 1}, {"b": 1}, {"a": 1}], "raised", "components ['b'] for sample 1, ['a'] for sample 0"),
        ([1, 10**400, 1], "raised", "int too large to convert to float"),
        ([{}, {}, {}], "raised", "returned an empty dict"),
        ([{"a": "x"}] * 3, "raised", "str 'x' for sample 0, not a number"),
    ],
)
def test_an_answer_that_is_no_score_is_a_typed_failure(answer: Any, kind: str, message: str) -> None:
    failure = only(read_answer("f", answer, (3,), 0.0))
    assert isinstance(failure, ScoreFailure)
    assert failure.kind == kind
    assert message in failure.message


def test_a_nan_spoils_only_its_own_group() -> None:
    first, second = read_answer("f", [1.0, float("nan"), 3.0], (2, 1), 0.5)
    assert isinstance(first, ScoreFailure)
    assert isinstance(second, Scores)
    assert second.values.tolist() == [3.0]
    assert second.seconds == 0.25


def test_what_the_function_raises_comes_back_with_its_traceback(make_group: MakeGroup) -> None:
    def explode(prompts: Any, responses: Any, metadata: Any) -> list[float]:
        raise LookupError("no oracle")

    failure = only(score_groups("oracle", explode, [make_group("1+1=", ["2"])]))
    assert (failure.name, failure.kind, failure.message) == ("oracle", "raised", "LookupError: no oracle")
    assert 'raise LookupError("no oracle")' in failure.traceback
    assert pickle.loads(pickle.dumps(failure)) == failure


def test_a_group_that_makes_a_shared_call_fail_is_found(make_group: MakeGroup) -> None:
    calls: list[int] = []

    def function(prompts: list[str], responses: list[str], metadata: Any) -> list[float]:
        calls.append(len(responses))
        return [1 / int(response) for response in responses]

    groups = [make_group("1=", ["1", "2"]), make_group("2=", ["0"], 1), make_group("3=", ["4"], 2)]
    good, bad, also_good = score_groups("f", function, groups)
    assert good.values.tolist() == [1.0, 0.5]
    assert bad.kind == "raised"
    assert also_good.values.tolist() == [0.25]
    assert calls == [4, 2, 1, 1]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@given(answer=ANYTHING)
def test_whatever_a_function_returns_is_finite_scores_or_a_failure(answer: Any) -> None:
    for size, outcome in zip((2, 1), read_answer("f", answer, (2, 1), 0.0), strict=True):
        if isinstance(outcome, Scores):
            assert outcome.values.shape == (size,)
            assert np.isfinite(outcome.values).all()
