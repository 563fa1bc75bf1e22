"""Prompts of train() in, those of a run out; a data set of queries in, the batches of TRL's loop out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from rl_cluster.data.encode import encode_text
from rl_cluster.data.handed_over import read_prompts
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt

TEXT_COLUMNS = ("query", "prompt", "text")


class Queries(Dataset[dict[str, Any]]):
    """The rows of a data set with input_ids (int64 [P]) and query (text), whichever of the two they had."""

    def __init__(self, rows: Any, tokenizer: Any) -> None:
        self._rows, self._tokenizer = rows, tokenizer

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        row = {"query": row} if isinstance(row, str) else row
        if not isinstance(row, Mapping):
            raise BadInputError(
                f"PPOTrainer.dataset[{index}] is {type(row).__name__}: must be a text, or a dict with "
                "input_ids or query."
            )
        item = dict(row)
        text = next((item[name] for name in TEXT_COLUMNS if isinstance(item.get(name), str)), None)
        if "input_ids" not in item:
            if text is None or not text.strip():
                raise BadInputError(
                    f"PPOTrainer.dataset[{index}] has the columns {sorted(item)}: input_ids or a text called "
                    "query is needed, not empty."
                )
            item["input_ids"] = encode_text(self._tokenizer, text)
        item["input_ids"] = torch.as_tensor(item["input_ids"], dtype=torch.int64).reshape(-1)
        item.setdefault("query", self._tokenizer.decode(item["input_ids"]) if text is None else text)
        return item


def collate(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """A list per column; nothing is padded."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def make_dataloader(
    dataset: Any, tokenizer: Any, batch_size: int, seed: int, collator: Callable[..., Any] | None
) -> DataLoader[dict[str, Any]]:
    """Shuffled by the seed, whole batches only. BadInputError where there is not even one."""
    queries = Queries(dataset, tokenizer)
    if len(queries) < batch_size:
        raise BadInputError(
            f"PPOTrainer.dataset: {len(queries)} rows, less than PPOConfig.batch_size={batch_size}; lower it."
        )
    _ = queries[0]  # a wrong column is said now, not in the loop
    return DataLoader(
        queries,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collator or collate,
        generator=torch.Generator().manual_seed(seed),
    )


def read_ppo_prompts(
    field: str, prompts: Any, metadata: Any, tokenizer: Any, max_tokens: int
) -> tuple[Prompt, ...]:
    """prompts: as read_prompts, entries of a list too. metadata: a dict per prompt, or None."""
    limit = "of PPOConfig.max_prompt_length. Shorten it, or raise the limit where the model has room"
    read = read_prompts(prompts, tokenizer, field, max_tokens, bare=True, limit=limit)
    if metadata is None:
        return read
    if isinstance(metadata, str | bytes | Mapping) or not hasattr(metadata, "__len__"):
        raise BadInputError(f"metadata={metadata!r:.60}: give a list with a dict per prompt.")
    if len(metadata) != len(read):
        raise BadInputError(f"metadata: {len(metadata)} entries for {len(read)} prompts; give one each.")
    for index, entry in enumerate(metadata):
        if not isinstance(entry, Mapping):
            raise BadInputError(f"metadata[{index}]={entry!r:.60}: must be a dict.")
    pairs = zip(read, metadata, strict=True)
    return tuple(replace(prompt, metadata={**prompt.metadata, **entry}) for prompt, entry in pairs)
