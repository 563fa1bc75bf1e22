from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rl_cluster.data.encode import (
    UnusablePromptError,
    check_chat_template,
    encode_prompt,
    encode_text,
    special_tokens,
)
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_tokenizer

FUZZED = build_tokenizer("ab", 64, "{{ messages[0]['content'] }}")


def wrapping_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Adds special tokens of its own: a is 3, b is 4."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_text_becomes_one_token_per_character(tokenizer: Any) -> None:
    text, ids = encode_prompt(tokenizer, "1+2=")
    assert text == "1+2="
    assert ids.tolist() == [4, 13, 5, 17]
    assert ids.dtype.name == "int32"


def test_token_ids_are_taken_as_they_are_if_the_tokenizer_has_them(tokenizer: Any) -> None:
    ids = tokenizer("1+2=")["input_ids"]
    text, tokens = encode_prompt(tokenizer, ids)
    assert (text, tokens.tolist()) == ("1+2=", ids)
    with pytest.raises(UnusablePromptError, match=f"token id {len(tokenizer)} is not one of"):
        encode_prompt(tokenizer, [*ids, len(tokenizer)])


def test_opening_tokens_are_added_once_and_closing_ones_never() -> None:
    both = wrapping_tokenizer("<s> $A </s>")
    assert encode_text(both, "a b") == [0, 3, 4]
    assert encode_text(both, "<s> a b") == [0, 3, 4]
    assert encode_text(both, "a </s>") == [0, 3, 1, 1][: len(encode_text(both, "a </s>"))]
    assert encode_text(wrapping_tokenizer("$A"), "a b") == [3, 4]


def test_chat_goes_through_the_tokenizers_own_template_with_the_opening_of_the_answer(
    chat_tokenizer: Any,
) -> None:
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    text, ids = encode_prompt(chat_tokenizer, messages)
    assert text == "system: add user: 1+1 assistant: "
    assert ids.tolist() == chat_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_a_dropped_space_counts_as_an_unknown_character() -> None:
    spaceless = build_tokenizer("0123456789+", 64)
    with pytest.raises(UnusablePromptError, match=r"does not know ' ' in the prompt '1 \+ 1'"):
        encode_prompt(spaceless, "1 + 1")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("  \n", "the prompt is empty"),
        (None, "NoneType None, not a string, a list"),
        (7, "int 7, not a string, a list"),
        ("1+1 = Ω", "does not know 'ω' in the prompt '1+1 = Ω'"),
        ("\ud800", "not valid Unicode"),
        ([], "list of chat messages is empty"),
        (["hi"], "message 1 is not a {role, content} object"),
        ([{"role": "user"}], "the content of message 1 is NoneType"),
        ([{"role": "user", "content": " "}], "the content of message 1 is empty"),
        ([{"role": 3, "content": "x"}], "message 1 is not a {role, content} object"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "the last message is the assistant's",
        ),
    ],
)
def test_a_prompt_that_cannot_be_used_says_why(chat_tokenizer: Any, prompt: Any, message: str) -> None:
    with pytest.raises(UnusablePromptError) as caught:
        encode_prompt(chat_tokenizer, prompt)
    assert message in str(caught.value)


def test_a_template_that_refuses_the_messages_makes_the_row_unusable() -> None:
    picky = build_tokenizer("ab", 64, "{{ raise_exception('only user and assistant roles') }}")
    with pytest.raises(UnusablePromptError, match="only user and assistant roles"):
        encode_prompt(picky, [{"role": "critic", "content": "ab"}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(prompt=JSON | st.lists(st.fixed_dictionaries({"role": JSON, "content": JSON}), max_size=3))
def test_whatever_json_holds_is_tokens_or_an_unusable_prompt(prompt: Any) -> None:
    try:
        _, ids = encode_prompt(FUZZED, prompt)
    except UnusablePromptError:
        return
    assert len(ids) > 0


def test_eos_serves_as_pad_where_there_is_none(tokenizer: Any) -> None:
    assert (special_tokens(tokenizer).eos, special_tokens(tokenizer).pad) == (1, 0)
    without_pad = copy.deepcopy(tokenizer)
    without_pad.pad_token = None
    assert (special_tokens(without_pad).eos, special_tokens(without_pad).pad) == (1, 1)


def test_a_tokenizer_without_eos_is_refused(tokenizer: Any) -> None:
    without_eos = copy.deepcopy(tokenizer)
    without_eos.eos_token = None
    with pytest.raises(BadInputError, match=r"has no eos token.*Set \"eos_token\""):
        special_tokens(without_eos)


def test_chat_needs_a_template(tokenizer: Any, chat_tokenizer: Any) -> None:
    check_chat_template(chat_tokenizer)
    with pytest.raises(BadInputError, match="no chat template"):
        check_chat_template(tokenizer)
