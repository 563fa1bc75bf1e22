"""One row of fixed data (a mapping of columns) and a tokenizer in, an Example of token sequences out.

Prompts and responses are texts, chat messages or token ids. A response ends with the end token (token ids are
taken as they are). Where a sequence is too long, the prompt loses its start, then the response its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_cluster.config.fit import DPO, KTO, ORPO, SFT, FitDataConfig, Objective, RewardObjective
from rl_cluster.data.encode import (
    UnusablePromptError,
    encode_prompt,
    encode_text,
    is_token_ids,
    special_tokens,
    unknown_characters,
)

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Tokens:
    """tokens: int32 [L]. num_prompt: the first so many do not train (at least 1)."""

    tokens: np.ndarray
    num_prompt: int


@dataclass(frozen=True)
class Example:
    """sequences: one, or chosen and rejected. number: KTO's label (±1) or a reward pair's margin."""

    place: str
    sequences: tuple[Tokens, ...]
    number: float | None = None


@dataclass(frozen=True)
class Encoder:
    """What the encoding of a row depends on. max_length: tokens of prompt and response together."""

    tokenizer: Any
    data: FitDataConfig
    max_length: int

    def example(self, objective: Objective, record: Record, place: str) -> Example:
        """Raises UnusablePromptError, whose message is for the user."""
        return ENCODERS[type(objective)](self, objective, record, place)

    def joined(self, prompt: Sequence[int], response: Sequence[int]) -> Tokens:
        """The two cut to their limits: prompts keep their end, responses their start."""
        room = min(self.data.max_prompt_length, self.max_length - 1)
        kept = list(prompt)[-room:]
        tokens = np.array([*kept, *response][: self.max_length], dtype=np.int32)
        return Tokens(tokens, len(kept))

    def ended(self, ids: Sequence[int]) -> list[int]:
        """With the end token, once."""
        eos = special_tokens(self.tokenizer).eos
        return list(ids) if ids and ids[-1] == eos else [*ids, eos]


def pair_example(encoder: Encoder, _objective: Objective, record: Record, place: str) -> Example:
    """DPO and ORPO: prompt, chosen, rejected; or chosen and rejected as whole chats."""
    prompt, chosen, rejected = _pair_columns(encoder.data, record)
    if prompt is None:
        raise UnusablePromptError(f"no column {encoder.data.prompt_column!r}")
    ids, text = _prompt(encoder, prompt)
    both = tuple(
        encoder.joined(ids, _response(encoder, prompt, text, answer, name))
        for answer, name in ((chosen, "chosen"), (rejected, "rejected"))
    )
    return Example(place, _different(both))


def reward_example(encoder: Encoder, _objective: Objective, record: Record, place: str) -> Example:
    """As pair_example, the prompt optional; each text is followed by the token at which it is scored.

    transformers reads a score at the last token that is not padding. So where a tokenizer pads with its end
    token, the end token is left out here, and both read the score at the same place.
    """
    prompt, chosen, rejected = _pair_columns(encoder.data, record)
    ids, text = ([], "") if prompt is None else _prompt(encoder, prompt)
    both = []
    for answer, name in ((chosen, "chosen"), (rejected, "rejected")):
        if prompt is None:
            response = encoder.ended(encode_text(encoder.tokenizer, _text(answer, name)))
            _check_known(encoder, answer, response, name)
        else:
            response = _response(encoder, prompt, text, answer, name)
        both.append(_scored(encoder, encoder.joined(ids, response).tokens))
    column = encoder.data.margin_column
    margin = None if column is None else _number(record, column)
    return Example(place, _different(tuple(both)), margin)


def kto_example(encoder: Encoder, _objective: Objective, record: Record, place: str) -> Example:
    """Prompt, completion and whether it is a good one."""
    prompt = _column(record, encoder.data.prompt_column)
    ids, text = _prompt(encoder, prompt)
    completion = _column(record, encoder.data.completion_column)
    label = _truth(_column(record, encoder.data.label_column))
    response = _response(encoder, prompt, text, completion, "completion")
    return Example(place, (encoder.joined(ids, response),), 1.0 if label else -1.0)


def sft_example(encoder: Encoder, objective: Objective, record: Record, place: str) -> Example:
    """One sequence; of text rows, and where all trains, everything after the first token is trained."""
    assert isinstance(objective, SFT)
    if objective.rows == "text":
        text = _text(_column(record, encoder.data.text_column), "text")
        ids = encoder.ended(encode_text(encoder.tokenizer, text))
        _check_known(encoder, text, ids, "text")
        tokens = Tokens(np.array(ids[: encoder.max_length], dtype=np.int32), 1)
    else:
        prompt, answer = _demonstration(encoder.data, objective, record)
        prompt_ids, prompt_text = _prompt(encoder, prompt)
        tokens = encoder.joined(prompt_ids, _response(encoder, prompt, prompt_text, answer, "answer"))
        if objective.train_on == "all":
            tokens = Tokens(tokens.tokens, 1)
    if len(tokens.tokens) < 2:
        raise UnusablePromptError("fewer than two tokens: there is nothing to predict")
    return Example(place, (tokens,))


ENCODERS: dict[type, Callable[[Encoder, Objective, Record, str], Example]] = {
    SFT: sft_example,
    DPO: pair_example,
    ORPO: pair_example,
    KTO: kto_example,
    RewardObjective: reward_example,
}


def anchor_column(data: FitDataConfig, objective: Objective) -> str:
    """The column that every row of the objective's data must have."""
    if isinstance(objective, SFT):
        columns = {
            "text": data.text_column,
            "messages": data.messages_column,
            "completion": data.prompt_column,
        }
        return columns[objective.rows]
    return data.prompt_column if isinstance(objective, KTO) else data.chosen_column


def _demonstration(data: FitDataConfig, objective: SFT, record: Record) -> tuple[Any, Any]:
    if objective.rows == "completion":
        return _column(record, data.prompt_column), _column(record, data.completion_column)
    messages = _column(record, data.messages_column)
    if not _is_chat(messages) or len(messages) < 2 or messages[-1].get("role") != "assistant":
        raise UnusablePromptError("the messages are not a chat of two or more that ends with the assistant's")
    return list(messages[:-1]), [messages[-1]]


def _pair_columns(data: FitDataConfig, record: Record) -> tuple[Any, Any, Any]:
    """(prompt or None, chosen, rejected); of two whole chats, what they begin with alike is the prompt."""
    chosen, rejected = _column(record, data.chosen_column), _column(record, data.rejected_column)
    prompt = record.get(data.prompt_column)
    if prompt is not None or not (_is_chat(chosen) and _is_chat(rejected)):
        return prompt, chosen, rejected
    shorter = min(len(chosen), len(rejected)) - 1
    common = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    if common == 0:
        raise UnusablePromptError("the two chats have no common beginning to serve as the prompt")
    return list(chosen[:common]), list(chosen[common:]), list(rejected[common:])


def _prompt(encoder: Encoder, prompt: Any) -> tuple[list[int], str]:
    text, ids = encode_prompt(encoder.tokenizer, prompt)
    return ids.tolist(), text


def _response(encoder: Encoder, prompt: Any, prompt_text: str, answer: Any, name: str) -> list[int]:
    """Token ids of the answer, ended; of chats, what the template writes after the prompt."""
    if is_token_ids(answer):
        return list(answer)  # token ids, ended by whoever made them
    if _is_chat(prompt) or _is_chat(answer):
        if not _is_chat(prompt):
            raise UnusablePromptError(f"the {name} is chat messages, but the prompt is not")
        text = _continued(encoder, prompt, prompt_text, answer, name)
    else:
        text = _text(answer, name)
    ids = list(encoder.tokenizer(text, add_special_tokens=False)["input_ids"])
    _check_known(encoder, text, ids, name)
    return encoder.ended(ids)


def _continued(encoder: Encoder, prompt: Any, prompt_text: str, answer: Any, name: str) -> str:
    turns = answer if _is_chat(answer) else [{"role": "assistant", "content": _text(answer, name)}]
    # A template may refuse messages in any way it likes (jinja2 raises TemplateError, TypeError, …).
    try:
        whole = str(encoder.tokenizer.apply_chat_template([*prompt, *turns], tokenize=False))
    except Exception as error:
        raise UnusablePromptError(f"the chat template refuses the messages: {error}") from error
    if not whole.startswith(prompt_text):
        raise UnusablePromptError(f"the chat template writes the prompt differently before the {name}")
    text, eos = whole[len(prompt_text) :], encoder.tokenizer.eos_token
    ended = text.rstrip()
    return ended if eos and ended.endswith(eos) else text


def _scored(encoder: Encoder, tokens: np.ndarray) -> Tokens:
    special = special_tokens(encoder.tokenizer)
    length = len(tokens)
    while length > 1 and tokens[length - 1] == special.pad:
        length -= 1
    return Tokens(np.append(tokens[:length], special.eos).astype(np.int32), length)


def _different(both: tuple[Tokens, ...]) -> tuple[Tokens, ...]:
    if np.array_equal(both[0].tokens, both[1].tokens):
        raise UnusablePromptError("chosen and rejected are the same (within data.max_length)")
    return both


def _check_known(encoder: Encoder, text: str, ids: Sequence[int], name: str) -> None:
    if unknown := unknown_characters(encoder.tokenizer, text, ids):
        raise UnusablePromptError(f"the tokenizer does not know {unknown} in the {name} {text!r:.60}")


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UnusablePromptError(f"the {name} is {type(value).__name__} {value!r:.60}, not a string")
    if not value.strip():
        raise UnusablePromptError(f"the {name} is empty")
    return value


def _column(record: Record, column: str) -> Any:
    if record.get(column) is None:
        known = ", ".join(map(repr, record)) or "none"
        raise UnusablePromptError(f"no value in the column {column!r} (it has: {known})")
    return record[column]


WORDS = {"true": True, "1": True, "false": False, "0": False}
"""Labels as CSV files have them."""


def _truth(label: Any) -> bool:
    known = WORDS.get(label.strip().lower()) if isinstance(label, str) else label
    if known not in (True, False):
        raise UnusablePromptError(f"the label is {label!r:.40}, not true or false")
    return bool(known)


def _number(record: Record, column: str) -> float:
    value = _column(record, column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise UnusablePromptError(f"{column} is {value!r:.40}, not a finite number")
    return float(value)
