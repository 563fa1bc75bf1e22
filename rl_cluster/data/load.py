"""The data section of a configuration and a tokenizer in, the prompts to train and to evaluate on out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_cluster.config.data import AdditionSource, DataConfig, FileSource, ReasoningGymSource
from rl_cluster.data.addition import make_addition
from rl_cluster.data.encode import (
    UnusablePromptError,
    check_chat_template,
    encode_prompt,
    is_token_ids,
    special_tokens,
)
from rl_cluster.data.gym_families import make_gym_rows
from rl_cluster.data.readers import read_file
from rl_cluster.data.rows import BadRow, RawRows, Row, refuse_bad_rows
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt


@dataclass(frozen=True)
class PromptSets:
    """train and held_out share no row. skipped: the rows left out under on_bad_row=skip, with reasons."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    skipped: tuple[BadRow, ...] = ()


def load_prompts(config: DataConfig, tokenizer: Any) -> PromptSets:
    """Read, check and tokenise everything, once.

    Raises BadInputError for a tokenizer that cannot serve, for data that cannot be read, for bad rows
    (or, when these are skipped, if no row is left), and if holding rows out leaves nothing to train on.
    """
    special_tokens(tokenizer)
    train, held_out = _read_rows(config)
    prompts = [row.prompt for row in (*train.rows, *held_out.rows)]
    if any(isinstance(prompt, list) and not is_token_ids(prompt) for prompt in prompts):
        check_chat_template(tokenizer)
    train_prompts, bad = _tokenise(train, tokenizer, config.max_prompt_tokens)
    eval_prompts, eval_bad = _tokenise(held_out, tokenizer, config.max_prompt_tokens)
    refuse_bad_rows("data.train", bad, len(train_prompts) + len(bad), config.on_bad_row)
    refuse_bad_rows("data.train (held out)", eval_bad, len(eval_prompts) + len(eval_bad), config.on_bad_row)
    if isinstance(config.train, FileSource) and config.train.eval_path is None:
        train_prompts, eval_prompts = _split(train_prompts, config.held_out)
    return PromptSets(tuple(train_prompts), tuple(eval_prompts), tuple(bad + eval_bad))


def _read_rows(config: DataConfig) -> tuple[RawRows, RawRows]:
    """(training rows, held-out rows); a file without eval_path is split later, when bad rows are gone."""
    source = config.train
    if isinstance(source, FileSource):
        evaluated = RawRows(())
        if source.eval_path is not None:
            evaluated = read_file(source, source.eval_path, "data.train.eval_path")
        return read_file(source, source.path, "data.train.path"), evaluated
    train, held_out = _generate(source, config.held_out)
    return RawRows(train), RawRows(held_out)


def _generate(
    source: AdditionSource | ReasoningGymSource, held_out: int
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    if isinstance(source, AdditionSource):
        return make_addition(source, held_out)
    return make_gym_rows(source, held_out)


def _tokenise(raw: RawRows, tokenizer: Any, max_prompt_tokens: int) -> tuple[list[Prompt], list[BadRow]]:
    prompts: list[Prompt] = []
    bad = list(raw.bad)
    for row in raw.rows:
        tools = row.metadata.get("tools")
        try:
            text, tokens = encode_prompt(tokenizer, row.prompt, tools if isinstance(tools, list) else None)
        except UnusablePromptError as error:
            bad.append(BadRow(row.place, str(error)))
            continue
        if len(tokens) > max_prompt_tokens:
            reason = f"{len(tokens)} tokens, more than data.max_prompt_tokens={max_prompt_tokens}"
            bad.append(BadRow(row.place, reason))
            continue
        prompts.append(Prompt(row.place, tokens, text, dict(row.metadata)))
    return prompts, bad


def _split(prompts: list[Prompt], held_out: int) -> tuple[list[Prompt], list[Prompt]]:
    if held_out >= len(prompts):
        raise BadInputError(
            f"data.held_out={held_out}: there are only {len(prompts)} usable rows, so none would "
            "be left to train on. Hold out fewer, or name a file of evaluation rows in data.train.eval_path."
        )
    cut = len(prompts) - held_out
    return prompts[:cut], prompts[cut:]
