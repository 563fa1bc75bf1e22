"""One rank's state to and from disk, and the export of a Hugging Face folder; nothing is unpickled at load.

A checkpoint folder holds learner.json (ranks, engine, stage, updates) and rank-R.pt for every rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_cluster.errors import CheckpointError

SHARD_BYTES = 4 << 30
LAYOUT_FILE = "learner.json"


def write_rank_state(folder: Path, rank: int, state: dict[str, Any]) -> None:
    """Raises CheckpointError if the file cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, rank_file(folder, rank))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"learner state: cannot write {rank_file(folder, rank)}: {error}") from error


def read_rank_state(folder: Path, rank: int) -> dict[str, Any]:
    """Raises CheckpointError if the file is missing or damaged."""
    file = rank_file(folder, rank)
    try:
        result: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return result
    except Exception as error:  # torch raises many types for a damaged file; all mean the same here
        raise CheckpointError(f"learner state: cannot read {file}: {error}") from error


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pt"


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Raises CheckpointError if the file cannot be written."""
    file = folder / LAYOUT_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(manifest, indent=1) + "\n")
    except OSError as error:
        raise CheckpointError(f"learner state: cannot write {file}: {error}") from error


def check_manifest(folder: Path, expected: dict[str, Any]) -> None:
    """Raises CheckpointError where the checkpoint was made by a learner of another layout."""
    try:
        found = json.loads((folder / LAYOUT_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"learner state: cannot read {folder / 'learner.json'}: {error}") from error
    for name, value in expected.items():
        if found.get(name) != value:
            raise CheckpointError(
                f"learner state in {folder}: {name} was {found.get(name)!r} and is now {value!r}; "
                "resume with the settings of the checkpoint"
            )


def write_safetensors(folder: Path, stem: str, groups: Iterator[list[tuple[str, torch.Tensor]]]) -> None:
    """Write the tensors as STEM.safetensors, or as shards with an index when they exceed SHARD_BYTES."""
    shards: list[Path] = []
    sizes: list[tuple[list[str], int]] = []
    pending: dict[str, torch.Tensor] = {}
    for group in groups:
        size = sum(t.nbytes for _, t in group)
        if pending and sum(t.nbytes for t in pending.values()) + size > SHARD_BYTES:
            _flush(folder, stem, pending, shards, sizes)
        pending.update((name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in group)
    _flush(folder, stem, pending, shards, sizes)
    if len(shards) == 1:
        shards[0].rename(folder / f"{stem}.safetensors")
        return
    weight_map = {}
    for number, (shard, (names, _)) in enumerate(zip(shards, sizes, strict=True), start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(size for _, size in sizes)}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _flush(
    folder: Path,
    stem: str,
    pending: dict[str, torch.Tensor],
    shards: list[Path],
    sizes: list[tuple[list[str], int]],
) -> None:
    file = folder / f"{stem}.{len(shards)}.part"
    save_file(pending, file, metadata={"format": "pt"})
    shards.append(file)
    sizes.append((list(pending), sum(t.nbytes for t in pending.values())))
    pending.clear()
