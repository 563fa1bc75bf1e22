"""Imitation drives a learner to its demonstrations: here the real in-process one, on the tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from learners.spec import LearnerSpec
from learners.start import start_local_learner
from rl_cluster.batch import TokenBatch
from rl_cluster.config.run import OptimizerConfig, ScratchModel
from rl_cluster.loop.supervised import run_supervised
from rl_cluster.modeling.scratch import save_scratch_model
from rl_cluster.protocols import OptimResult


def copy_task(num_rows: int, seed: int) -> TokenBatch:
    """Rows "a b = a b": the prompt is two digits and a sign, the answer the same digits."""
    digits = np.random.default_rng(seed).integers(3, 13, (num_rows, 2))
    rows = np.concatenate([digits, np.full((num_rows, 1), 17), digits], axis=1).astype(np.int32)
    return TokenBatch(
        tokens=rows.flatten(),
        lengths=np.full(num_rows, 5, dtype=np.int32),
        action_mask=np.tile([False, False, False, True, True], num_rows),
        units=np.arange(num_rows, dtype=np.int32),
        group_ids=np.arange(num_rows, dtype=np.int32),
    )


async def test_the_loss_falls_from_uniform_to_nothing(tmp_path: Path) -> None:
    scratch = ScratchModel(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2)
    save_scratch_model(scratch, tmp_path)
    optimizer = OptimizerConfig(learning_rate=3e-3, schedule="linear", warmup_steps=5)
    learner = start_local_learner(
        LearnerSpec(str(tmp_path), engine="torch", optimizer=optimizer, total_steps=150, num_threads=1)
    )
    losses: list[float] = []

    def note(step: int, loss: float, result: OptimResult) -> None:
        assert step == result.step
        losses.append(loss)

    await run_supervised(learner, (copy_task(64, seed) for seed in range(150)), note)
    assert losses[0] == pytest.approx(np.log(21), abs=0.3)
    assert np.mean(losses[-10:]) < 0.05
