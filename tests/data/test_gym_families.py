from __future__ import annotations

import pytest

from rl_cluster.config.data import ReasoningGymSource
from rl_cluster.data.gym_families import make_gym_rows
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.functions import reasoning_gym_score


def source(**options: object) -> ReasoningGymSource:
    return ReasoningGymSource(**{"source": "reasoning_gym", "family": "chain_sum", **options})  # type: ignore[arg-type]


def test_rows_carry_question_answer_and_what_the_familys_scorer_needs() -> None:
    train, held_out = make_gym_rows(source(size=30, options={"min_terms": 2, "max_terms": 2}), held_out=10)
    assert len(held_out) == 10
    for row in (*train, *held_out):
        expression = row.prompt.removesuffix(" =").rpartition(": ")[2]
        assert eval(expression) == int(row.metadata["answer"])
        assert reasoning_gym_score([""], [row.metadata["answer"]], [row.metadata]) == [1.0]


def test_no_question_is_both_trained_and_held_out() -> None:
    few = source(size=500, options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    train, held_out = make_gym_rows(few, held_out=50)
    assert not {row.prompt for row in train} & {row.prompt for row in held_out}
    assert len(train) < 500


def test_the_same_rows_come_every_time() -> None:
    assert make_gym_rows(source(size=20), 5) == make_gym_rows(source(size=20), 5)


def test_chat_makes_one_user_message() -> None:
    train, _ = make_gym_rows(source(size=1, chat=True), 0)
    assert train[0].prompt == [{"role": "user", "content": train[0].metadata["entry"]["question"]}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "chain_sums"}, r"data\.train\.family='chain_sums'.*Did you mean chain_sum"),
        ({"family": "zzzz"}, r"has no such family\. There are: "),
        ({"options": {"bogus": 3}}, r"data\.train\.options=\{'bogus': 3\}: refused by chain_sum: .*bogus"),
        ({"options": {"min_terms": 30}}, r"refused by chain_sum: max_terms must be"),
    ],
)
def test_an_unknown_family_or_option_is_refused(options: dict, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        make_gym_rows(source(size=5, **options), 2)
