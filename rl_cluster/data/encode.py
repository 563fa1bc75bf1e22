"""A prompt as text, chat messages or token ids and the policy's tokenizer in, text and token ids out."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_cluster.errors import BadInputError


class UnusablePromptError(ValueError):
    """Why one row's prompt cannot be used; caught where rows are counted."""


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that end and pad a sequence. pad is eos where the tokenizer has no pad token."""

    eos: int
    pad: int


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """BadInputError for a tokenizer without an end token: a response could never end."""
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if eos is None:
        raise BadInputError(
            f"model.path={tokenizer.name_or_path!r}: its tokenizer has no eos token, so no response could "
            'end. Set "eos_token" in tokenizer_config.json.'
        )
    return SpecialTokens(eos=eos, pad=eos if pad is None else pad)


def check_chat_template(tokenizer: Any) -> None:
    """BadInputError for a tokenizer that cannot render chat messages."""
    if not tokenizer.chat_template:
        raise BadInputError(
            f"model.path={tokenizer.name_or_path!r}: the prompts are chat messages, but its tokenizer has no "
            "chat template. Use plain text prompts (chat: false), or a model with a chat template."
        )


def is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(entry) is int for entry in prompt)


def encode_prompt(tokenizer: Any, prompt: Any, tools: Sequence[Any] | None = None) -> tuple[str, np.ndarray]:
    """(text, int32 [P]): what a reader and what the engine sees of a string, a list of {role, content}, or
    a list of token ids (taken as they are).

    Chat messages go through the tokenizer's own template, with the opening of the answer; tools: JSON schemas
    that the template is told of. Raises UnusablePromptError, whose message is for the user.
    """
    if isinstance(prompt, str):
        text, ids = prompt, encode_text(tokenizer, _checked_text(prompt, "the prompt"))
    elif is_token_ids(prompt):
        return _decoded(tokenizer, prompt)
    elif isinstance(prompt, list):
        text = _render(tokenizer, prompt, tools)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        raise UnusablePromptError(
            f"the prompt is {type(prompt).__name__} {prompt!r:.60}, not a string, a list of chat messages or "
            "a list of token ids"
        )
    if not ids:
        raise UnusablePromptError(f"the prompt {text!r:.60} has no tokens")
    if unknown := unknown_characters(tokenizer, text, ids):
        raise UnusablePromptError(f"the tokenizer does not know {unknown} in the prompt {text!r:.60}")
    return text, np.array(ids, dtype=np.int32)


def _decoded(tokenizer: Any, ids: list[int]) -> tuple[str, np.ndarray]:
    outside = [token for token in ids if not 0 <= token < len(tokenizer)]
    if outside:
        raise UnusablePromptError(f"token id {outside[0]} is not one of the tokenizer's {len(tokenizer)}")
    return tokenizer.decode(ids), np.array(ids, dtype=np.int32)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that is to be continued: the tokenizer's opening tokens once, no closing one."""
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    ids = list(tokenizer(text, add_special_tokens=not has_bos)["input_ids"])
    closes = tokenizer.eos_token is not None and text.endswith(tokenizer.eos_token)
    while ids and not closes and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        ids.pop()
    return ids


def unknown_characters(tokenizer: Any, text: str, ids: Sequence[int]) -> str:
    """The characters of `text` that its token ids have lost, quoted; "" if there are none.

    White space of any kind counts as one character; case and compatibility forms may change.
    """
    lost = _characters(text.strip()) - _characters(tokenizer.decode(ids))
    return ", ".join(map(repr, sorted(lost)))


def _characters(text: str) -> set[str]:
    normal = unicodedata.normalize("NFKC", text).casefold()
    return {" " if character.isspace() else character for character in normal}


def _checked_text(text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise UnusablePromptError(f"{what} is {type(text).__name__} {text!r:.60}, not a string")
    if not text.strip():
        raise UnusablePromptError(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusablePromptError(f"{what} is not valid Unicode (character {error.start + 1})") from error
    return text


def _render(tokenizer: Any, messages: Sequence[Any], tools: Sequence[Any] | None) -> str:
    if not messages:
        raise UnusablePromptError("the list of chat messages is empty")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UnusablePromptError(f"message {number} is not a {{role, content}} object: {message!r:.60}")
        _checked_text(message.get("content"), f"the content of message {number}")
    if messages[-1]["role"] == "assistant":
        raise UnusablePromptError("the last message is the assistant's: there is nothing left to answer")
    # A template may refuse messages in any way it likes (jinja2 raises TemplateError, TypeError, …).
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools or None, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        raise UnusablePromptError(f"the chat template refuses the messages: {error}") from error
    return str(text)
