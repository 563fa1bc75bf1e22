"""Whole runs on the real stack, small enough for tests: settings in, the run's folder out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rl_cluster.assembly.train import train
from rl_cluster.config.checks.run import check_config
from rl_cluster.config.planning.machine import find_machine
from rl_cluster.config.planning.plan import make_plan
from rl_cluster.config.reading.load import parse_config
from rl_cluster.run_folder.folder import RunFolder, create_run_folder

BASE: dict[str, Any] = {
    "run": {"name": "test", "steps": 4, "seed": 3},
    "model": {
        "scratch": {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 128,
            "max_positions": 32,
        }
    },
    "data": {"train": {"source": "addition", "answer_digits": 3}, "held_out": 20},
    "rewards": {"scorers": [{"kind": "function", "function": "tests.stack.scorers:share_of_digits"}]},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_micro_batch": 256},
    "rollout": {"max_new_tokens": 6, "kv_cache_gib": 0.1, "deadline_seconds": 120.0},
    "optimizer": {"learning_rate": 1e-3},
    "eval": {"num_prompts": 10},
    "cluster": {"device": "cpu"},
    "log": {"progress": "plain", "samples_every": 0},
}


def settings(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """BASE with some keys of some sections replaced."""
    return {**BASE, **{name: {**BASE.get(name, {}), **section} for name, section in sections.items()}}


def run(folder: Path, values: dict[str, Any], resume: bool = False) -> RunFolder:
    """What `launch.py train` does, in this process and on the Ray that is up."""
    config = parse_config({**values, "run": {**values["run"], "dir": str(folder)}})
    machine = find_machine(config.cluster)
    check_config(config, machine)
    plan = make_plan(config, machine)
    target = RunFolder(folder) if resume else create_run_folder(config)
    train(config, plan, folder if resume else None)
    return target


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(folder.model / "model.safetensors")


def same_bytes(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
