"""Prompts in any form that a user has them in; checked Prompts of a run out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_cluster.data.encode import UnusablePromptError, check_chat_template, encode_prompt, special_tokens
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt

PROMPT_COLUMNS = ("prompt", "query")


@dataclass(frozen=True)
class PromptRow:
    """prompt: text, chat messages or token ids, unchecked. metadata: what reaches the reward function."""

    prompt: Any
    metadata: Mapping[str, Any]


def read_rows(field: str, prompts: Any, metadata: Any = None) -> list[PromptRow]:
    """prompts: a list (or data set) of texts, chats, token ids, or dicts with a column `prompt` or `query`.

    metadata: a dict per prompt, or None. BadInputError names `field`.
    """
    whole = not isinstance(prompts, str | bytes | Mapping) and hasattr(prompts, "__len__")
    if not whole or not hasattr(prompts, "__getitem__") or not len(prompts):
        raise BadInputError(f"{field}={prompts!r:.60}: give a list of at least one prompt.")
    rows = [_row(field, index, prompts[index]) for index in range(len(prompts))]
    if metadata is None:
        return rows
    if isinstance(metadata, str | bytes | Mapping) or not hasattr(metadata, "__len__"):
        raise BadInputError(f"metadata={metadata!r:.60}: give a list with a dict per prompt.")
    if len(metadata) != len(rows):
        raise BadInputError(f"metadata: {len(metadata)} entries for {len(rows)} prompts; give one each.")
    return [
        PromptRow(row.prompt, {**row.metadata, **_metadata_of(index, metadata[index])})
        for index, row in enumerate(rows)
    ]


def _row(field: str, index: int, entry: Any) -> PromptRow:
    if not isinstance(entry, Mapping):
        return PromptRow(entry.tolist() if hasattr(entry, "tolist") else entry, {})
    column = next((name for name in PROMPT_COLUMNS if name in entry), None)
    if column is None:
        raise BadInputError(
            f"{field}[{index}] has the columns {sorted(map(str, entry))}: one called prompt is needed."
        )
    return PromptRow(entry[column], {key: value for key, value in entry.items() if key != column})


def _metadata_of(index: int, entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise BadInputError(f"metadata[{index}]={entry!r:.60}: must be a dict.")
    return entry


def encode_rows(field: str, rows: Sequence[PromptRow], tokenizer: Any, limit: int) -> tuple[Prompt, ...]:
    """limit: tokens; a longer prompt is refused, as are empty ones. BadInputError names `field`."""
    special_tokens(tokenizer)
    if any(isinstance(row.prompt, list) and row.prompt and isinstance(row.prompt[0], dict) for row in rows):
        check_chat_template(tokenizer)
    return tuple(_encode(f"{field}[{index}]", row, tokenizer, limit) for index, row in enumerate(rows))


def _encode(place: str, row: PromptRow, tokenizer: Any, limit: int) -> Prompt:
    try:
        text, tokens = encode_prompt(tokenizer, row.prompt)
    except UnusablePromptError as error:
        raise BadInputError(f"{place}: {error}. Correct it or leave it out.") from error
    if len(tokens) > limit:
        raise BadInputError(
            f"{place}={text!r:.60}: {len(tokens)} tokens, more than the {limit} of "
            "PPOConfig.max_prompt_length. Shorten it, or raise the limit where the model has room."
        )
    return Prompt(place, tokens, text, dict(row.metadata))


def plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON can hold it, for the copy in the run folder; the reward function gets the original."""
    result: dict[str, Any] = json.loads(
        json.dumps({str(key): value for key, value in metadata.items()}, default=repr)
    )
    return result
