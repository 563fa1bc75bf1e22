"""Every trained trajectory as a row of a Parquet file: what a viewer needs to show it token by token."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from rl_cluster.batch import TOKEN_COLUMNS, TokenBatch
from rl_cluster.errors import CheckpointError
from rl_cluster.trajectory import TrajectoryGroup


def write_trajectories(path: str, scores: np.ndarray, batch: TokenBatch, *groups: TrajectoryGroup) -> int:
    """One row per sample; returns their number. scores: float64 [N], shaped, NaN: none. Complete or absent.

    Raises CheckpointError on a full disk.
    """
    import pyarrow
    import pyarrow.parquet

    offsets = batch.offsets
    pieces = [slice(offsets[i], offsets[i + 1]) for i in range(batch.num_rows)]
    samples = [(group, index, t) for group in groups for index, t in enumerate(group.trajectories)]
    columns: dict[str, list[object]] = {
        "group_id": [group.group_id for group, _, _ in samples],
        "sample": [index for _, index, _ in samples],
        "prompt_id": [group.prompt.prompt_id for group, _, _ in samples],
        "prompt": [group.prompt.text for group, _, _ in samples],
        "response": [t.response_text for _, _, t in samples],
        "finish_reason": [t.finish_reason for _, _, t in samples],
        "score": [None if np.isnan(score) else float(score) for score in scores],
        "tokens": [t.tokens for _, _, t in samples],
        "action_mask": [t.action_mask for _, _, t in samples],
        "policy_versions": [t.policy_versions for _, _, t in samples],
    }
    for name in TOKEN_COLUMNS:
        column = getattr(batch, name)
        if column is not None:
            columns[name] = [column[piece] for piece in pieces]
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), partial, compression="zstd")
        os.rename(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"{target} could not be written: {error}. Free space, or set log.trajectories=false."
        ) from error
    return len(samples)
