"""A whole GRPO run in which engine and learner take turns on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.stack.runs import run, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(900),
]


def test_a_colocated_run_trains_and_its_log_probabilities_agree(tmp_path: Path) -> None:
    values = settings(
        cluster={"device": "cuda", "colocate": True},
        learner={"num_ranks": 1, "zero_stage": 3, "offload_optimizer": True},
        rollout={"max_new_tokens": 6, "gpu_memory_fraction": 0.3, "enforce_eager": True},
        model={
            "dtype": "bfloat16",
            "scratch": {"hidden_size": 128, "num_heads": 2, "num_layers": 2, "max_positions": 32},
        },
    )
    folder = run(tmp_path / "colocated", values)
    rows = folder.read_metrics()[1:]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["health/logprob_gap_mean"] for row in rows) < 0.05
    assert (folder.model / "model.safetensors").is_file()
