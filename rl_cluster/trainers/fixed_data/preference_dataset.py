"""Prompts with a better and a worse response each in; token sequences and where the response begins out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from rl_cluster.checks import check_texts, check_whole_number
from rl_cluster.data.encode import SpecialTokens, encode_text, special_tokens
from rl_cluster.errors import BadInputError


@dataclass(frozen=True)
class PreferenceRow:
    """Token ids without padding; chosen and rejected hold the response alone, ended by EOS unless cut."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


class PreferenceDataset(Dataset):
    """A torch Dataset of preference pairs; `rows` holds the same without padding.

    An item is {"prompt_input_ids", "prompt_attention_mask": int64 [P]; "chosen_input_ids", … and
    "rejected_input_ids", …: int64 [L], prompt and response; "prompt_length": int}. Entry t of a chosen or
    rejected sequence belongs to the response where t ≥ prompt_length and its mask is 1. Padding is on the
    right, up to the longest of the data set (P, L), so that a DataLoader can stack items.

    max_length: tokens of prompt and response together. max_prompt_length: a longer prompt keeps its end,
    which is what the response answers. A response that does not fit is cut and then has no EOS, because it
    does not end there. Prompt and responses are encoded apart, so both responses follow the same prompt.

    Raises BadInputError for ragged or empty lists, anything but strings, empty prompts, a tokenizer without
    an end token, and lengths that leave no room for a response.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        chosen: Sequence[str],
        rejected: Sequence[str],
        tokenizer: Any,
        max_length: int = 512,
        max_prompt_length: int = 256,
    ) -> None:
        _check(prompts, chosen, rejected, max_length, max_prompt_length)
        if not callable(tokenizer):
            raise BadInputError(
                f"PreferenceDataset.tokenizer={tokenizer!r:.60}: give a tokenizer, such as "
                "AutoTokenizer.from_pretrained(model_name)."
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.max_prompt_length = max_prompt_length
        self._special = special_tokens(tokenizer)
        self.rows = tuple(
            self._encode(number, *texts)
            for number, texts in enumerate(zip(prompts, chosen, rejected, strict=True))
        )
        self._prompt_width = max(len(row.prompt) for row in self.rows)
        self._width = max(len(row.prompt) + max(len(row.chosen), len(row.rejected)) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        item: dict[str, Any] = {}
        for name, ids, width in (
            ("prompt", row.prompt, self._prompt_width),
            ("chosen", row.prompt + row.chosen, self._width),
            ("rejected", row.prompt + row.rejected, self._width),
        ):
            item[f"{name}_input_ids"], item[f"{name}_attention_mask"] = _pad(ids, width, self._special)
        item["prompt_length"] = len(row.prompt)
        return item

    def _encode(self, number: int, prompt: str, chosen: str, rejected: str) -> PreferenceRow:
        prompt_ids = encode_text(self.tokenizer, prompt)[-self.max_prompt_length :]
        if not prompt_ids:
            raise BadInputError(
                f"PreferenceDataset.prompts[{number}]={prompt!r:.60}: the tokenizer makes no tokens of it; "
                "use another tokenizer, or leave the row out."
            )
        room = self.max_length - len(prompt_ids)
        responses = (tuple(self._response(text)[:room]) for text in (chosen, rejected))
        return PreferenceRow(tuple(prompt_ids), *responses)

    def _response(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        ends = bool(ids) and ids[-1] == self._special.eos
        return ids if ends else [*ids, self._special.eos]


def _check(prompts: Any, chosen: Any, rejected: Any, max_length: Any, max_prompt_length: Any) -> None:
    columns = {"prompts": prompts, "chosen": chosen, "rejected": rejected}
    for name, texts in columns.items():
        check_texts(f"PreferenceDataset.{name}", texts, may_be_blank=name != "prompts")
    if len({len(texts) for texts in columns.values()}) > 1:
        sizes = ", ".join(f"{len(texts)} {name}" for name, texts in columns.items())
        raise BadInputError(f"PreferenceDataset: {sizes}; give one chosen and one rejected response each.")
    check_whole_number("PreferenceDataset.max_length", max_length)
    check_whole_number("PreferenceDataset.max_prompt_length", max_prompt_length)
    if max_prompt_length >= max_length:
        raise BadInputError(
            f"PreferenceDataset.max_prompt_length={max_prompt_length}: must be below max_length "
            f"({max_length}), or the longest prompts leave no room for a response."
        )


def _pad(ids: Sequence[int], width: int, special: SpecialTokens) -> tuple[torch.Tensor, torch.Tensor]:
    padding = width - len(ids)
    return (
        torch.tensor([*ids, *[special.pad] * padding], dtype=torch.int64),
        torch.tensor([1] * len(ids) + [0] * padding, dtype=torch.int64),
    )
