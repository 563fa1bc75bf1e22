"""Fits on Ray: two DeepSpeed ranks under ZeRO-3 do what one plain process does, also under LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_cluster.assembly.fit import FitResult, fit
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.reading.load import parse_as

pytestmark = pytest.mark.stack

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b}{b % 10}"}
    for a in range(5)
    for b in range(5)
]
RAY = {"backend": "ray", "device": "cpu", "cpus_per_worker": 1}
LOCAL = {"backend": "local", "device": "cpu", "cpus_per_worker": 1}


def run(
    folder: Path, name: str, cluster: Mapping[str, Any], lora: Any = None, resume: bool = False
) -> FitResult:
    scratch = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "max_positions": 32}
    config = {
        "run": {"dir": str(folder), "epochs": 1},
        "model": {"scratch": scratch, "lora": lora},
        "data": {"source": "given", "held_out": 5},
        "objective": {"name": name},
        "batch": {"rows_per_step": 7, "tokens_per_micro_batch": 48},
        "optimizer": {"learning_rate": 3e-3},
        "learner": {"num_ranks": 2 if cluster is RAY else 1},
        "cluster": cluster,
        "checkpoint": {"every": 1, "keep_last": 3},
        "log": {"progress": "none", "tensorboard": False},
    }
    return fit(parse_as(FitConfig, config), rows=PAIRS, resume=folder if resume else None)


def losses(result: FitResult) -> list[float]:
    return [row[name] for row in result.metrics for name in ("train/loss", "eval/loss") if name in row]


def difference(one: Path, other: Path, file: str) -> float:
    ours, theirs = load_file(one / file), load_file(other / file)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize(
    ("name", "lora", "file"),
    [("dpo", None, "model.safetensors"), ("dpo", {"rank": 4}, "adapter_model.safetensors")],
)
def test_two_zero3_ranks_train_as_one_plain_process(
    ray_session: Iterator[None], tmp_path: Path, name: str, lora: Any, file: str
) -> None:
    ranks = run(tmp_path / "ray", name, RAY, lora)
    alone = run(tmp_path / "local", name, LOCAL, lora)
    assert losses(ranks) == pytest.approx(losses(alone), rel=1e-4)
    assert losses(ranks)[-1] < losses(ranks)[0]
    # Adam turns rounding of tiny gradients into differences of the order of the learning rate.
    assert difference(ranks.model, alone.model, file) < 1e-3


def test_a_reward_model_of_two_ranks_resumes_bit_for_bit(ray_session: Iterator[None], tmp_path: Path) -> None:
    whole = run(tmp_path / "ray", "reward", RAY)
    assert losses(whole) == pytest.approx(losses(run(tmp_path / "local", "reward", LOCAL)), rel=1e-4)
    expected = load_file(whole.model / "model.safetensors")
    for step in (3, 2):
        (whole.folder / "checkpoints" / f"step-{step}").rename(tmp_path / f"away-{step}")
    resumed = run(tmp_path / "ray", "reward", RAY, resume=True)
    assert losses(resumed) == losses(whole)
    found = load_file(resumed.model / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
