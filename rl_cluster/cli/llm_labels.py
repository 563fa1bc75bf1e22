"""Rows of text and label in, pairs of chosen and rejected texts for a reward model out."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from rl_cluster.cli.llm_data import DataFile
from rl_cluster.cli.llm_flags import Flags
from rl_cluster.config.data import FileSource
from rl_cluster.data.readers import read_file
from rl_cluster.errors import BadInputError
from rl_cluster.run_folder.claim import make_room


def has_labels_only(flags: Flags, file: DataFile) -> bool:
    """Texts with labels and no pairs."""
    if flags.rejected_text_column is not None:
        return False
    text, label = flags.text_column or "text", flags.label_column or "label"
    rejected = flags.rejected_text_column or "rejected"
    return text in file.columns and label in file.columns and rejected not in file.columns


def pairs_from_labels(flags: Flags, file: DataFile, workspace: Path) -> DataFile:
    """workspace/pairs.jsonl: each text with the next one of a lower label, of the same prompt where there are
    prompts. Labels are numbers or true and false. BadInputError where no two texts differ in their labels."""
    text, label = flags.text_column or "text", flags.label_column or "label"
    prompt = flags.prompt_text_column or "prompt"
    source = FileSource(source=file.source, path=file.path, prompt_column=text)  # type: ignore[arg-type]
    groups: dict[Any, list[tuple[float, str]]] = defaultdict(list)
    for row in read_file(source, file.path, "--data-path").rows:
        key = json.dumps(row.metadata.get(prompt))
        groups[key].append((_number(row.metadata, label, row.place), row.prompt))
    pairs = [
        ({} if key == "null" else {"prompt": json.loads(key)}) | pair
        for key, members in groups.items()
        for pair in _pairs(members)
    ]
    if not pairs:
        raise BadInputError(
            f"--label-column {label}: no two texts of {file.path} that belong to one prompt have different "
            "labels, so there is nothing to compare."
        )
    target = make_room(workspace / "pairs.jsonl")
    target.write_text(
        "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs), encoding="utf-8"
    )
    return DataFile("jsonl", str(target), tuple(pairs[0]), len(pairs))


def _pairs(members: list[tuple[float, str]]) -> list[dict[str, str]]:
    """The k-th text of a level is chosen over the k-th (going round) of the next level below."""
    levels: dict[float, list[str]] = defaultdict(list)
    for number, text in members:
        levels[number].append(text)
    ordered = [levels[number] for number in sorted(levels, reverse=True)]
    return [
        {"chosen": better[i % len(better)], "rejected": worse[i % len(worse)]}
        for better, worse in pairwise(ordered)
        for i in range(max(len(better), len(worse)))
    ]


WORDS = {"true": 1.0, "false": 0.0}


def _number(row: Mapping[str, Any], column: str, place: str) -> float:
    value = row.get(column)
    word = str(value).strip().lower()
    try:
        return WORDS[word] if word in WORDS else float(word)
    except ValueError:
        raise BadInputError(
            f"--label-column {column}: {place} has {value!r:.40}; give numbers, or true and false."
        ) from None
