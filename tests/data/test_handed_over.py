"""Rows of any kind become prompts, or an error that says which row and what to do."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch

from rl_cluster.data.handed_over import plain_metadata, read_prompts, read_rows
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_tokenizer

TOKENIZER = build_tokenizer("0123456789=+", 32)


def read(dataset: Any, **options: Any) -> Any:
    return read_prompts(dataset, TOKENIZER, "train_dataset", **options)


def test_texts_and_token_ids_give_the_same_prompt_and_other_columns_are_metadata() -> None:
    ids = TOKENIZER("12=")["input_ids"]
    (text,) = read([{"prompt": "12=", "answer": "3"}])
    (padded,) = read(
        datasets.Dataset.from_list(
            [{"input_ids": [0, 0, *ids], "attention_mask": [0, 0, 1, 1, 1], "answer": "3"}]
        )
    )
    (tensor,) = read([{"input_ids": torch.tensor(ids), "answer": "3"}])
    for prompt in (text, padded, tensor):
        np.testing.assert_array_equal(prompt.tokens, ids)
        assert prompt.text == "12="
        assert prompt.metadata == {"answer": "3"}


def test_a_one_token_prompt_and_a_torch_dataset_are_fine() -> None:
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"prompt": str(index)}

    prompts = read(Rows())
    assert [prompt.tokens.tolist() for prompt in prompts] == [[3], [4]]


def test_a_dict_of_datasets_is_read_one_after_the_other() -> None:
    parts = {"a": [{"prompt": "1"}], "b": [{"prompt": "2"}]}
    assert [row["prompt"] for row in read_rows(parts, "eval_dataset")] == ["1", "2"]


ROWS = [{"prompt": "1", "answer": 2}, {"prompt": "2", "answer": 3}]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        iter(ROWS),
        (row for row in ROWS),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        datasets.DatasetDict(a=datasets.Dataset.from_list(ROWS[:1]), b=datasets.Dataset.from_list(ROWS[1:])),
        {"a": ROWS[:1], "b": ROWS[1:]},
        {"prompt": ["1", "2"], "answer": [2, 3]},
        {"prompt": np.array(["1", "2"]), "answer": (2, 3)},
    ],
)
def test_rows_are_the_same_in_every_form(data: Any) -> None:
    assert read_rows(data, "rows") == ROWS


def test_entries_that_are_no_dicts_are_prompts_where_they_may_be() -> None:
    given = [
        "12=",
        [3, 4],
        np.array([3, 4]),
        torch.tensor([5]),
        {"query": "1", "answer": 2},
        {"input_ids": [3]},
    ]
    prompts = read(given, bare=True)
    assert [prompt.tokens.tolist() for prompt in prompts][1:] == [[3, 4], [3, 4], [5], [4], [3]]
    assert prompts[0].text == "12=" and prompts[4].metadata == {"answer": 2}


def test_columns_of_different_lengths_and_rows_without_a_column_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"rows: the columns have {'a': 1, 'b': 2} values"):
        read_rows({"a": [1], "b": [1, 2]}, "rows")
    with pytest.raises(BadInputError, match=r"rows\[1\]: has no 'b'; it has a, b"):
        read_rows([{"b": 1}, {"a": 1, "b": None}], "rows", needed=("b",))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, r"train_dataset is NoneType None: give a datasets.Dataset"),
        ("prompts.jsonl", r"train_dataset is str 'prompts.jsonl': give a datasets.Dataset"),
        ([], r"train_dataset has no rows"),
        (["12="], r"train_dataset: row 0 is str '12=', not a row"),
        (
            [{"query": "1"}],
            r"row 0 has neither a column 'prompt'.*It has: 'query'.*rename_column\('query', 'prompt'\)",
        ),
        ([{"prompt": "1"}, {"prompt": " "}], r"row 1: the prompt is empty"),
        ([{"prompt": 7}], r"row 0: the prompt is int 7, not a string"),
        ([{"input_ids": []}], r"row 0: input_ids is \[\], not a list of token ids"),
        ([{"input_ids": [1.5]}], r"input_ids is \[1.5\], not a list"),
        ([{"input_ids": [99]}], r"token id 99 is not one of the tokenizer's 15"),
        ([{"input_ids": [3], "attention_mask": [1, 1]}], r"attention_mask has 2 entries for 1 input_ids"),
        ([{"input_ids": [3], "attention_mask": [0]}], r"attention_mask hides all of the prompt"),
        ([{"prompt": "123456"}], r"row 0: 6 tokens, more than the 5 that are allowed"),
    ],
)
def test_bad_rows_are_refused_by_place_and_reason(dataset: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=f"(?s){message}"):
        read(dataset, max_tokens=5)


def test_only_columns_that_json_can_hold_go_into_the_run_folder() -> None:
    (prompt,) = read([{"prompt": "1", "answer": ["a", 1], "tensor": torch.ones(2), "nested": {"a": {1: 2}}}])
    assert plain_metadata([prompt]) == [{"answer": ["a", 1]}]
