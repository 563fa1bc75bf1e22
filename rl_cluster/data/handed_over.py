"""Rows in any form that a user has them in; rows as dicts, and prompts for a run, out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_cluster.data.encode import UnusablePromptError, check_chat_template, encode_prompt
from rl_cluster.data.rows import BadRow, list_bad_rows
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt

Rows = list[dict[str, Any]]
A_PROMPT = 'rows such as {"prompt": "…"}'
PROMPT_COLUMNS = ("prompt", "query")


def read_rows(
    data: Any, field: str, *, what: str = A_PROMPT, bare: str | None = None, needed: Sequence[str] = ()
) -> Rows:
    """The rows of a datasets.Dataset, a torch Dataset, a list or an iterator; of a dict of such, all; or
    those of a dict of columns.

    field: the argument, and what: rows of what kind, for messages. bare: the column that an entry which is no
    dict is the value of; None: such entries are refused. needed: columns that all rows must have, not None.
    Raises BadInputError.
    """
    if isinstance(data, Mapping) and data and all(map(_is_rows, data.values())):
        if not any(map(_is_column, data.values())):
            parts = [read_rows(part, f"{field}[{name!r}]", bare=bare) for name, part in data.items()]
            return [row for part in parts for row in part]
        data = _of_columns(data, field)
    if not _is_rows(data):
        raise BadInputError(
            f"{field} is {type(data).__name__} {data!r:.60}: give a datasets.Dataset or a list of {what}."
        )
    rows = [_row(entry, number, field, what, bare) for number, entry in enumerate(_items(data))]
    if not rows:
        raise BadInputError(f"{field} has no rows: it is empty. Give a list of {what}.")
    for number, row in enumerate(rows):
        missing = [name for name in needed if row.get(name) is None]
        if missing:
            columns = ", ".join(map(str, row)) or "nothing"
            raise BadInputError(f"{field}[{number}]: has no {missing[0]!r}; it has {columns}.")
    return rows


def read_prompts(
    data: Any,
    tokenizer: Any,
    field: str,
    max_tokens: int | None = None,
    tools: Sequence[Any] = (),
    *,
    bare: bool = False,
    limit: str = "that are allowed",
) -> tuple[Prompt, ...]:
    """A prompt per row: of its token ids (`input_ids`, without what `attention_mask` hides) or of `prompt`.

    `prompt` (or `query`) is text, token ids, or chat messages, rendered with the tokenizer's template, which
    is told of the tools. The other columns become the prompt's metadata. max_tokens: the longest that is
    allowed, which is `limit`, in words. bare: entries may be prompts themselves. BadInputError lists the rows
    that cannot be used.
    """
    what = "at least one prompt" if bare else A_PROMPT
    rows = read_rows(data, field, what=what, bare="prompt" if bare else None)
    columns = (*PROMPT_COLUMNS, "input_ids") if bare else ("input_ids", "prompt")
    prompts: list[Prompt] = []
    bad: list[BadRow] = []
    for number, row in enumerate(rows):
        place = f"{field}[{number}]" if bare else f"{field} row {number}"
        column = _column(row, place, field, columns)
        try:
            asked = _token_ids(row) if column == "input_ids" else row[column]
            if isinstance(asked, list) and asked and isinstance(asked[0], dict):
                check_chat_template(tokenizer)
            text, tokens = encode_prompt(tokenizer, asked, list(tools))
            if max_tokens is not None and len(tokens) > max_tokens:
                raise UnusablePromptError(f"{len(tokens)} tokens, more than the {max_tokens} {limit}")
        except UnusablePromptError as error:
            bad.append(BadRow(place, str(error)))
            continue
        used = {column, "attention_mask"} if column == "input_ids" else {column}
        metadata = {name: value for name, value in row.items() if name not in used}
        prompts.append(Prompt(place, tokens, text, metadata))
    if bad:
        raise BadInputError(
            f"{field}: {len(bad)} of {len(rows)} rows cannot be used:\n{list_bad_rows(bad)}\nCorrect them."
        )
    return tuple(prompts)


def plain_metadata(prompts: Sequence[Prompt]) -> Rows:
    """The columns that JSON can hold, for the copy of the prompts in the run folder."""
    return [
        {name: value for name, value in prompt.metadata.items() if _is_plain(value) and name != "prompt"}
        for prompt in prompts
    ]


def _column(row: Mapping[str, Any], place: str, field: str, names: Sequence[str]) -> str:
    found = [name for name in names if row.get(name) is not None] or [name for name in names if name in row]
    if not found:
        columns = ", ".join(map(repr, row)) or "none"
        raise BadInputError(
            f"{place} has neither a column 'prompt' (text or chat messages) nor 'input_ids' (token ids). "
            f"It has: {columns}; one called prompt is needed. Rename a column, for example: "
            f"{field}.rename_column({next(iter(row), 'text')!r}, 'prompt')."
        )
    return found[0]


def _row(entry: Any, number: int, field: str, what: str, bare: str | None) -> dict[str, Any]:
    if isinstance(entry, Mapping):
        return dict(entry)
    if bare is None:
        raise BadInputError(
            f"{field}: row {number} is {type(entry).__name__} {entry!r:.60}, not a row: give {what}."
        )
    return {bare: entry.tolist() if hasattr(entry, "tolist") else entry}


def _of_columns(data: Mapping[str, Any], field: str) -> Rows:
    sizes = {name: len(column) for name, column in data.items()}
    if len(set(sizes.values())) > 1:
        raise BadInputError(f"{field}: the columns have {sizes} values. Give as many of each.")
    return [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]


def _token_ids(row: Mapping[str, Any]) -> list[int]:
    ids = np.asarray(row["input_ids"])
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise UnusablePromptError(f"input_ids is {row['input_ids']!r:.60}, not a list of token ids")
    whole: list[int] = ids.tolist()
    if row.get("attention_mask") is None:
        return whole
    mask = np.asarray(row["attention_mask"])
    if mask.shape != ids.shape:
        raise UnusablePromptError(
            f"attention_mask has {mask.size} entries for {ids.size} input_ids: give as many"
        )
    kept: list[int] = ids[mask != 0].tolist()
    if not kept:
        raise UnusablePromptError("attention_mask hides all of the prompt")
    return kept


def _is_rows(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping):
        return False
    return hasattr(value, "__iter__") or (hasattr(value, "__len__") and hasattr(value, "__getitem__"))


def _is_column(value: Any) -> bool:
    """A list of values, and not of rows."""
    return isinstance(value, list | tuple | np.ndarray) and not (len(value) and isinstance(value[0], Mapping))


def _items(data: Any) -> Iterable[Any]:
    # A torch Dataset has no __iter__, and Python's fallback would need an IndexError at its end.
    return data if hasattr(data, "__iter__") else (data[i] for i in range(len(data)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(entry) for entry in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    return value is None or isinstance(value, str | int | float | bool)
