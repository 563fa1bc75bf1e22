"""Which of the documented forms a reward has is read from its signature; each is called as it wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rl_cluster.errors import BadInputError
from rl_cluster.trainers.reward_signatures import RewardCall, RewardScorer, checked_rewards, reward_call

PROMPTS, RESPONSES, METADATA = ["a", "bb"], ["x", "yyy"], [{"n": 1}, {"n": 2}]


def call(function: Any) -> Any:
    return reward_call(function, None)(PROMPTS, RESPONSES, METADATA)


def documented_batch(prompts, responses, metadata=None):  # type: ignore[no-untyped-def]
    return [len(p) + 10 * len(r) + 100 * m["n"] for p, r, m in zip(prompts, responses, metadata, strict=True)]


def without_metadata(prompts, responses):  # type: ignore[no-untyped-def]
    return [len(p) + 10 * len(r) for p, r in zip(prompts, responses, strict=True)]


def other_names(queries, answers, rows=None):  # type: ignore[no-untyped-def]
    return [len(q) + 10 * len(a) + 100 * m["n"] for q, a, m in zip(queries, answers, rows, strict=True)]


def keywords(responses, prompts, **more):  # type: ignore[no-untyped-def]
    return documented_batch(prompts, responses, more["metadata"])


def documented_sample(prompt, generated, full_text):  # type: ignore[no-untyped-def]
    assert full_text == prompt + generated
    return len(prompt) + 10 * len(generated)


def sample_in_another_order(full_text, generated, prompt):  # type: ignore[no-untyped-def]
    return documented_sample(prompt, generated, full_text)


def documented_texts(texts):  # type: ignore[no-untyped-def]
    return [len(text) for text in texts]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (documented_batch, [111, 232]),
        (without_metadata, [11, 32]),
        (other_names, [111, 232]),
        (keywords, [111, 232]),
        (lambda prompts, responses, *, metadata: documented_batch(prompts, responses, metadata), [111, 232]),
        (documented_sample, [11, 32]),
        (sample_in_another_order, [11, 32]),
        (documented_texts, [2, 5]),
    ],
)
def test_every_form_gets_its_arguments(function: Callable[..., Any], expected: list[int]) -> None:
    assert call(function) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: 0.0,
        lambda *args: 0.0,
        lambda **kwargs: 0.0,
        lambda: 0.0,
        lambda a, b, c, d: 0.0,
        lambda text, *, scale: 0.0,
        lambda prompts, responses, answers: [0.0],
    ],
)
def test_what_could_be_several_forms_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(BadInputError, match="how is it to be called"):
        reward_call(function, None)


@pytest.mark.parametrize("reward", [3, "reward", None, [len], int, nn.Linear(2, 2)])
def test_what_is_no_reward_is_refused(reward: Any) -> None:
    with pytest.raises(BadInputError, match="reward_fn"):
        reward_call(reward, None)


class ScoresTexts(nn.Module):
    """As RewardModel: a list of lists."""

    def predict_rewards(self, texts: list[str], tokenizer: str) -> list[list[float]]:
        assert tokenizer == "its tokenizer"
        return [[float(len(text))] for text in texts]


def test_a_reward_model_scores_prompt_and_response_together() -> None:
    assert reward_call(ScoresTexts(), "its tokenizer")(PROMPTS, RESPONSES, METADATA) == [2.0, 5.0]


def score_all(scorer: RewardScorer, texts: list[str]) -> list[Any]:
    async def run() -> list[Any]:
        rows = [scorer(["p"], [text], [{}]) for text in texts]
        return await asyncio.gather(*rows, return_exceptions=True)

    return asyncio.run(run())


def test_what_is_scored_at_the_same_time_is_one_call() -> None:
    calls: list[list[str]] = []

    def reward(prompts, responses):  # type: ignore[no-untyped-def]
        calls.append(responses)
        return torch.tensor([float(r) for r in responses])

    answers = score_all(RewardScorer(reward_call(reward, None)), ["1", "2", "3"])
    assert [[float(x) for x in answer] for answer in answers] == [[1.0], [2.0], [3.0]]
    assert calls == [["1", "2", "3"]]


def test_a_failing_row_is_found_and_spoils_no_other() -> None:
    def reward(prompts, responses):  # type: ignore[no-untyped-def]
        return [1.0 / float(r) for r in responses]

    one, two, three = score_all(RewardScorer(reward_call(reward, None)), ["1", "0", "2"])
    assert one == [1.0] and three == [0.5]
    assert isinstance(two, ZeroDivisionError)


@pytest.mark.parametrize("form", ["batch", "sample"])
def test_a_coroutine_function_is_awaited(form: str) -> None:
    async def batch(prompts: list[str], responses: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(r) for r in responses]

    async def sample(prompt: str, generated: str, full_text: str) -> float:
        await asyncio.sleep(0)
        return float(generated)

    function = batch if form == "batch" else sample
    assert score_all(RewardScorer(reward_call(function, None)), ["4", "5"]) == [[4.0], [5.0]]


@pytest.mark.parametrize("answer", [[1.0], [1.0, 2.0, 3.0], 1.0, None, "12", {"a": 1, "b": 2}])
def test_an_answer_of_the_wrong_length_or_kind_is_an_error(answer: Any) -> None:
    with pytest.raises(BadInputError, match=r"2 numbers is needed|for 2 responses"):
        checked_rewards(answer, 2)


def test_a_scorer_without_a_function_says_so() -> None:
    (answer,) = score_all(RewardScorer(None), ["1"])
    assert isinstance(answer, BadInputError) and "reward_fn" in str(answer)


def test_a_call_is_plain_data() -> None:
    assert reward_call(documented_texts, None) == RewardCall(documented_texts, "texts")
