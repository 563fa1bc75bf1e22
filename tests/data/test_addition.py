from __future__ import annotations

import pytest

from rl_cluster.config.data import AdditionSource
from rl_cluster.data import addition
from rl_cluster.data.addition import make_addition
from rl_cluster.errors import BadInputError


def source(**options: object) -> AdditionSource:
    return AdditionSource(source="addition", **options)  # type: ignore[arg-type]


def operands(rows: tuple) -> list[tuple[int, int]]:
    return [(row.metadata["a"], row.metadata["b"]) for row in rows]


def test_one_digit_has_55_pairs_and_100_sums_split_without_overlap() -> None:
    train, held_out = make_addition(source(num_digits=1), held_out=10)
    pairs = [tuple(sorted(p)) for p in operands(held_out)]
    assert len(set(pairs)) == 10
    assert not set(pairs) & {tuple(sorted(p)) for p in operands(train)}
    ordered = set(operands(train))
    assert len(ordered) == len(train) == 100 - sum(1 if a == b else 2 for a, b in pairs)
    assert all((b, a) in ordered for a, b in ordered)


def test_two_digits_have_4095_pairs_of_numbers_from_10_to_99() -> None:
    train, held_out = make_addition(source(num_digits=2), held_out=4094)
    assert len(held_out) == 4094
    assert len(train) in (1, 2)
    assert {x for pair in operands(held_out) for x in pair} | {x for p in operands(train) for x in p} == set(
        range(10, 100)
    )


def test_prompt_answer_and_place_belong_together() -> None:
    train, _ = make_addition(source(num_digits=3, template="what is {b} plus {a}?", size=50), held_out=20)
    assert len(train) == 50
    for row in train:
        a, b = row.metadata["a"], row.metadata["b"]
        assert row.prompt == f"what is {b} plus {a}?"
        assert row.metadata["answer"] == str(a + b)
        assert row.place == f"addition: {a}+{b}"


def test_held_out_sums_come_in_both_orders() -> None:
    _, held_out = make_addition(source(num_digits=2), held_out=1000)
    ascending = sum(a < b for a, b in operands(held_out))
    assert 400 < ascending < 600


def test_large_numbers_are_drawn_not_listed_and_split_as_strictly() -> None:
    train, held_out = make_addition(source(num_digits=30, size=300), held_out=100)
    assert len(train) == 300
    assert len(held_out) == 100
    assert all(len(str(x)) == 30 for pair in operands(train) for x in pair)
    assert len({str(a)[0] for a, _ in operands(train)}) == 9
    assert not {tuple(sorted(p)) for p in operands(train)} & {tuple(sorted(p)) for p in operands(held_out)}


def test_drawn_pairs_are_distinct_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addition, "MAX_ENUMERATED", 0)
    train, held_out = make_addition(source(num_digits=1, size=15), held_out=12)
    unordered = [frozenset(pair) for pair in operands(held_out)]
    assert len(set(unordered)) == 12
    assert not set(unordered) & {frozenset(pair) for pair in operands(train)}


def test_the_split_is_the_same_every_time() -> None:
    assert make_addition(source(), held_out=200) == make_addition(source(), held_out=200)


def test_chat_makes_one_user_message() -> None:
    train, _ = make_addition(source(num_digits=1, chat=True), held_out=5)
    assert train[0].prompt == [
        {"role": "user", "content": "{a}+{b}=".format(**train[0].metadata)},
    ]


def test_holding_out_every_pair_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"data\.held_out=55: there are only 55 pairs of 1-digit"):
        make_addition(source(num_digits=1), held_out=55)


@pytest.mark.parametrize("template", ["{a}+{c}=", "{a}+{", "{a}=", "{}{}", "{a.real.x}{b}", "sum"])
def test_a_template_that_cannot_be_filled_is_refused(template: str) -> None:
    with pytest.raises(BadInputError, match=r"data\.train\.template="):
        make_addition(source(template=template), held_out=5)
