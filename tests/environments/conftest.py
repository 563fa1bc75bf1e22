"""A tokenizer of single characters, made here, whose end token is </s>."""

import string

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer():
    characters = sorted(set(string.printable) | set("éüß"))
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", "<turn>", *characters])}
    core = Tokenizer(models.WordLevel(vocabulary))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    return made


@pytest.fixture(scope="session")
def ids(tokenizer):
    """text -> its token ids."""
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
