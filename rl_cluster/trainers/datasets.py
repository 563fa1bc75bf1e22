"""What users call a dataset (datasets.Dataset, a list of rows) in; checked, tokenised prompts out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_cluster.data.encode import UnusablePromptError, encode_prompt
from rl_cluster.data.rows import BadRow, list_bad_rows
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt

Rows = list[dict[str, Any]]


def read_rows(dataset: Any, field: str) -> Rows:
    """The rows of a datasets.Dataset, a list of dicts or a torch Dataset of dicts; of a dict of such, all.

    field: the argument, for messages. BadInputError for other types, for no rows, for rows that are no dicts.
    """
    if isinstance(dataset, Mapping) and dataset and all(_is_rows(part) for part in dataset.values()):
        return [row for name, part in dataset.items() for row in read_rows(part, f"{field}[{name!r}]")]
    if not _is_rows(dataset):
        raise BadInputError(
            f"{field} is {type(dataset).__name__} {dataset!r:.60}: give a datasets.Dataset or a list of rows "
            'such as {"prompt": "…"}.'
        )
    rows = list(_items(dataset))
    if not rows:
        raise BadInputError(f"{field} has no rows. Give at least one.")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BadInputError(
                f"{field}: row {number} is {type(row).__name__} {row!r:.60}, not a row such as "
                '{"prompt": "…"}.'
            )
    return [dict(row) for row in rows]


def read_prompts(
    dataset: Any, tokenizer: Any, field: str, max_tokens: int | None = None, tools: Sequence[Any] = ()
) -> tuple[Prompt, ...]:
    """A prompt per row: of its token ids (`input_ids`, without what `attention_mask` hides) or of `prompt`.

    `prompt` is text, or chat messages, rendered with the tokenizer's template, which is told of the tools.
    The other columns become the prompt's metadata. max_tokens: the longest that is allowed. BadInputError
    lists the rows that cannot be used.
    """
    rows = read_rows(dataset, field)
    prompts: list[Prompt] = []
    bad: list[BadRow] = []
    for number, row in enumerate(rows):
        place = f"{field} row {number}"
        try:
            prompts.append(_prompt(row, place, tokenizer, max_tokens, field, tools))
        except UnusablePromptError as error:
            bad.append(BadRow(place, str(error)))
    if bad:
        raise BadInputError(
            f"{field}: {len(bad)} of {len(rows)} rows cannot be used:\n{list_bad_rows(bad)}\nCorrect them."
        )
    return tuple(prompts)


def _prompt(
    row: dict[str, Any], place: str, tokenizer: Any, max_tokens: int | None, field: str, tools: Sequence[Any]
) -> Prompt:
    column = "input_ids" if row.get("input_ids") is not None else "prompt"
    if column not in row:
        columns = ", ".join(map(repr, row)) or "none"
        raise BadInputError(
            f"{place} has neither a column 'prompt' (text or chat messages) nor 'input_ids' (token ids). "
            f"It has: {columns}. Rename a column, for example: {field}.rename_column("
            f"{next(iter(row), 'text')!r}, 'prompt')."
        )
    asked = _token_ids(row) if column == "input_ids" else row["prompt"]
    text, tokens = encode_prompt(tokenizer, asked, list(tools))
    if max_tokens is not None and len(tokens) > max_tokens:
        raise UnusablePromptError(f"{len(tokens)} tokens, more than the {max_tokens} that are allowed")
    used = {column, "attention_mask"} if column == "input_ids" else {column}
    metadata = {name: value for name, value in row.items() if name not in used}
    return Prompt(place, tokens, text, metadata)


def _token_ids(row: Mapping[str, Any]) -> list[int]:
    ids = np.asarray(row["input_ids"])
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise UnusablePromptError(f"input_ids is {row['input_ids']!r:.60}, not a list of token ids")
    if row.get("attention_mask") is None:
        every: list[int] = ids.tolist()
        return every
    mask = np.asarray(row["attention_mask"])
    if mask.shape != ids.shape:
        raise UnusablePromptError(
            f"attention_mask has {mask.size} entries for {ids.size} input_ids: give as many"
        )
    kept = ids[mask != 0]
    if kept.size == 0:
        raise UnusablePromptError("attention_mask hides all of the prompt")
    shown: list[int] = kept.tolist()
    return shown


def _is_rows(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping):
        return False
    return hasattr(value, "__len__") and (hasattr(value, "__iter__") or hasattr(value, "__getitem__"))


def _items(dataset: Any) -> Iterable[Any]:
    # A torch Dataset has no __iter__, and Python's fallback would need an IndexError at its end.
    return dataset if hasattr(dataset, "__iter__") else (dataset[i] for i in range(len(dataset)))


def plain_metadata(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """The columns that JSON can hold, for the copy of the prompts in the run folder."""
    return [
        {name: value for name, value in prompt.metadata.items() if _is_plain(value) and name != "prompt"}
        for prompt in prompts
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(entry) for entry in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    return value is None or isinstance(value, str | int | float | bool)
