from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_cluster.data.demonstrations import demonstrations, wrong_answer
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt


def prompts(tokenizer: Any, count: int) -> list[Prompt]:
    texts = [f"{i}+{i}=" for i in range(count)]
    return [
        Prompt(f"p{i}", np.array(tokenizer(text)["input_ids"], dtype=np.int32), text, {"answer": str(2 * i)})
        for i, text in enumerate(texts)
    ]


def test_a_row_is_prompt_answer_and_end_token_and_only_the_last_two_are_learned(tokenizer: Any) -> None:
    batch = demonstrations(prompts(tokenizer, 12)[10:], tokenizer)
    ids = tokenizer("10+10=")["input_ids"] + tokenizer("20")["input_ids"] + [tokenizer.eos_token_id]
    ids += tokenizer("11+11=")["input_ids"] + tokenizer("22")["input_ids"] + [tokenizer.eos_token_id]
    assert batch.tokens.tolist() == ids
    assert batch.tokens.dtype == np.int32
    assert batch.action_mask.tolist() == ([False] * 6 + [True] * 3) * 2
    assert batch.lengths.tolist() == [9, 9]
    assert batch.units.tolist() == batch.group_ids.tolist() == [0, 1]


@pytest.mark.parametrize(("fraction", "num_right"), [(1.0, 200), (0.26, 52), (0.0, 0)])
def test_exactly_the_given_share_of_answers_is_right(tokenizer: Any, fraction: float, num_right: int) -> None:
    rows = prompts(tokenizer, 200)
    batch = demonstrations(rows, tokenizer, correct_fraction=fraction, seed=4)
    offsets = batch.offsets
    shown = [
        tokenizer.decode(batch.tokens[start:end][batch.action_mask[start:end]][:-1])
        for start, end in pairwise(offsets)
    ]
    right = [text == row.metadata["answer"] for text, row in zip(shown, rows, strict=True)]
    assert sum(right) == num_right
    assert all(len(text) == len(row.metadata["answer"]) for text, row in zip(shown, rows, strict=True))


def test_the_seed_decides_which_answers_are_wrong_and_how(tokenizer: Any) -> None:
    rows = prompts(tokenizer, 50)
    first, again, other = (
        demonstrations(rows, tokenizer, correct_fraction=0.5, seed=seed).tokens.tolist() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@given(
    answer=st.from_regex(r"\A(-?[0-9]{1,12}(\.[0-9]{1,3})?|[a-z ]*[a-z][a-z ]*)\Z"), seed=st.integers(0, 99)
)
def test_a_wrong_answer_is_another_of_the_same_length(answer: str, seed: int) -> None:
    wrong = wrong_answer(answer, seed, "key")
    assert wrong != answer
    assert len(wrong) == len(answer)
    digits = [character.isdigit() for character in answer]
    if any(digits):
        assert [character.isdigit() for character in wrong] == digits
        assert float(wrong) != float(answer)
        grown = wrong.lstrip("-").startswith("0") and len(answer.lstrip("-").split(".")[0]) > 1
        assert not grown or answer.lstrip("-").startswith("0")


def test_an_answer_with_characters_that_the_tokenizer_drops_is_refused(tokenizer: Any) -> None:
    row = prompts(tokenizer, 1)[0]
    with pytest.raises(BadInputError, match=r"the answer '4 €', and the tokenizer does not know '€'"):
        demonstrations([Prompt("p", row.tokens, row.text, {"answer": "4 €"})], tokenizer)


@pytest.mark.parametrize("answer", [None, "", "  ", ["4"]])
def test_a_prompt_without_an_answer_is_refused(tokenizer: Any, answer: Any) -> None:
    row = prompts(tokenizer, 1)[0]
    bare = Prompt("train.jsonl:3", row.tokens, row.text, {"answer": answer})
    with pytest.raises(BadInputError, match=r"train\.jsonl:3 has no 'answer' to demonstrate"):
        demonstrations([row, bare], tokenizer)
