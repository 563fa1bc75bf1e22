"""Rows of any kind become prompts, or an error that says which row and what to do."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch

from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_tokenizer
from rl_cluster.trainers.datasets import plain_metadata, read_prompts, read_rows

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
