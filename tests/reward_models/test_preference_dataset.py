"""Preference pairs as tokens: where the response begins, where it ends, what is padding."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from rl_cluster import PreferenceDataset
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_tokenizer

TOKENIZER = build_tokenizer("abcdefghij", 64)  # <pad> 0, <eos> 1, a 3, b 4, …
EOS = 1


def ids(text):
    return [ord(letter) - ord("a") + 3 for letter in text]


def test_an_item_holds_prompt_and_response_with_its_end_and_no_pad_in_either():
    dataset = PreferenceDataset(["abc", "d"], ["ef", "g"], ["h", "ghij"], TOKENIZER)
    assert len(dataset) == 2
    item = dataset[1]
    assert set(item) == {
        *(
            f"{name}_{part}"
            for name in ("prompt", "chosen", "rejected")
            for part in ("input_ids", "attention_mask")
        ),
        "prompt_length",
    }
    assert item["prompt_input_ids"].tolist() == [*ids("d"), 0, 0]
    assert item["prompt_attention_mask"].tolist() == [1, 0, 0]
    assert item["chosen_input_ids"].tolist() == [*ids("dg"), EOS, 0, 0, 0]
    assert item["chosen_attention_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    assert item["rejected_input_ids"].tolist() == [*ids("dghij"), EOS]
    assert item["prompt_length"] == 1
    assert dataset[0]["prompt_length"] == 3
    assert dataset.rows[0].prompt == tuple(ids("abc"))
    assert dataset.rows[0].chosen == (*ids("ef"), EOS)
    with pytest.raises(IndexError):
        dataset[2]


def test_a_plain_data_loader_stacks_items_with_a_prompt_length_per_row():
    dataset = PreferenceDataset(["abc", "d"], ["ef", "g"], ["h", "ghij"], TOKENIZER)
    (batch,) = DataLoader(dataset, batch_size=2)
    assert batch["prompt_length"].tolist() == [3, 1]
    places = torch.arange(batch["chosen_input_ids"].shape[1])
    response = batch["chosen_attention_mask"].bool() & (places >= batch["prompt_length"][:, None])
    assert batch["chosen_input_ids"][response].tolist() == [*ids("ef"), EOS, *ids("g"), EOS]


def test_a_long_prompt_keeps_its_end_and_a_response_that_does_not_fit_has_no_end():
    dataset = PreferenceDataset(["abcdef"], ["gh"], ["ghij"], TOKENIZER, max_length=6, max_prompt_length=3)
    row = dataset.rows[0]
    assert row.prompt == tuple(ids("def"))
    assert row.chosen == (*ids("gh"), EOS)
    assert row.rejected == tuple(ids("ghi"))
    assert dataset[0]["rejected_input_ids"].tolist() == ids("defghi")


def test_an_end_token_that_is_there_is_not_doubled_and_an_empty_response_is_its_end():
    dataset = PreferenceDataset(["a"], ["b<eos>"], [""], TOKENIZER)
    assert dataset.rows[0].chosen == (*ids("b"), EOS)
    assert dataset.rows[0].rejected == (EOS,)


def test_a_tokenizer_that_pads_with_its_end_token_marks_the_true_end_by_the_mask():
    tokenizer = build_tokenizer("abcdefghij", 64)
    tokenizer.pad_token = None
    item = PreferenceDataset(["a"], ["b"], ["cde"], tokenizer)[0]
    assert item["chosen_input_ids"].tolist() == [*ids("ab"), EOS, EOS, EOS]
    assert item["chosen_attention_mask"].tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, r"PreferenceDataset.prompts=\[\]: give a list of at least one string"),
        ({"chosen": ["b"]}, "2 prompts, 1 chosen, 2 rejected; give one chosen and one rejected"),
        ({"rejected": ["b", "c", "d"]}, "2 prompts, 2 chosen, 3 rejected"),
        ({"prompts": ["a", " "]}, r"prompts\[1\]=' ': is empty"),
        ({"prompts": ["a", "é"]}, r"prompts\[1\]='é': the tokenizer makes no tokens"),
        ({"prompts": ["a", None]}, r"prompts\[1\]=None: must be a string, not NoneType"),
        ({"chosen": ["b", 3]}, r"chosen\[1\]=3: must be a string, not int"),
        ({"rejected": "bc"}, "rejected='bc': give a list"),
        ({"tokenizer": "gpt2"}, "tokenizer='gpt2': give a tokenizer"),
        ({"max_length": 4, "max_prompt_length": 4}, "max_prompt_length=4: must be below max_length"),
        ({"max_length": 0}, "max_length=0: must be a whole number"),
        ({"max_prompt_length": 1.5}, "max_prompt_length=1.5: must be a whole number"),
    ],
)
def test_bad_rows_and_lengths_are_refused_by_name(arguments, message):
    good = {"prompts": ["a", "b"], "chosen": ["b", "c"], "rejected": ["c", "d"], "tokenizer": TOKENIZER}
    with pytest.raises(BadInputError, match=message):
        PreferenceDataset(**{**good, **arguments})


def test_a_tokenizer_without_an_end_token_is_refused():
    tokenizer = build_tokenizer("abc", 64)
    tokenizer.eos_token = None
    with pytest.raises(BadInputError, match="no eos token"):
        PreferenceDataset(["a"], ["b"], ["c"], tokenizer)
