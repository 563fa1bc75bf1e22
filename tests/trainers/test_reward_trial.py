"""Reward functions handed to a trainer are tried once, with a real prompt, before any worker starts."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from rl_cluster.errors import BadInputError
from rl_cluster.trainers import online_run
from rl_cluster.trainers.grpo.trainer import GRPOTrainer
from tests.trainers.test_grpo_trainer import ROWS, arguments
from tests.trainers.tiny import tiny_model


class Started(Exception):  # noqa: N818 — the session would have started here
    pass


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Up to the start of the session."""

    def no_session(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr(online_run, "TrainerSession", no_session)
    model, tokenizer = tiny_model()

    def run(reward: Any) -> None:
        GRPOTrainer(model, reward, arguments(tmp_path), ROWS, processing_class=tokenizer).train()

    return run


def wrong_length(completions: list[str], **_: Any) -> list[float]:
    return [0.0, 1.0]


def a_number(completions: list[str], **_: Any) -> float:
    return 0.0


async def later(completions: list[str], **_: Any) -> str:
    return "good"


def column(completions: list[str], **columns: Any) -> list[float]:
    return [float(c == s) for c, s in zip(completions, columns["solution"], strict=True)]


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (wrong_length, "reward wrong_length, called with one prompt .* returned 2 rewards for 1 responses"),
        (a_number, "returned float 0.0: a list of 1 numbers"),
        (later, "returned str 'good'"),
        (column, "it looks for 'solution', and the columns of the data are: answer"),
    ],
)
def test_a_wrong_function_is_refused_before_the_session(train: Any, reward: Any, told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        train(reward)


def test_what_an_empty_response_makes_it_raise_is_a_warning(train: Any) -> None:
    def mean(completions: list[str], **_: Any) -> list[float]:
        return [1 / len(c) for c in completions]

    with pytest.warns(UserWarning, match="reward mean, .* raised ZeroDivisionError"), pytest.raises(Started):
        train(mean)


def test_the_trial_is_one_call_with_a_real_prompt_and_leaves_the_random_state(train: Any) -> None:
    seen: list[Any] = []

    def draws(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        seen.append((prompts, completions, answer))
        return [random.random() for _ in completions]

    random.seed(5)
    expected = random.random()
    random.seed(5)
    with warnings.catch_warnings(), pytest.raises(Started):
        warnings.simplefilter("error", UserWarning)
        train(draws)
    assert seen == [([ROWS[0]["prompt"]], [""], [ROWS[0]["answer"]])]
    assert random.random() == expected
