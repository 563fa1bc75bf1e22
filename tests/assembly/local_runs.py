"""Small runs of the local backend: settings in, the run folder out, by the way of `launch.py train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_cluster.assembly.given import Given
from rl_cluster.assembly.run import OpenRun, open_run
from rl_cluster.assembly.train import load_tokenizer, train
from rl_cluster.assembly.warm_start import scratch_folder
from rl_cluster.config.checks.run import check_config
from rl_cluster.config.planning.machine import find_machine
from rl_cluster.config.planning.plan import Plan, make_plan
from rl_cluster.config.reading.load import parse_config
from rl_cluster.config.run import RunConfig
from rl_cluster.data.load import PromptSets, load_prompts
from rl_cluster.metrics.observer import RunObserver
from rl_cluster.run_folder.folder import RunFolder, create_run_folder

BASE: dict[str, Any] = {
    "run": {"steps": 4, "seed": 3},
    "model": {
        "scratch": {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 64,
            "max_positions": 32,
        }
    },
    "data": {"train": {"source": "addition", "answer_digits": 3}, "held_out": 20},
    "rewards": {"scorers": [{"kind": "function", "function": "tests.assembly.local_scorers:digits"}]},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_micro_batch": 256},
    "rollout": {"max_new_tokens": 6},
    "optimizer": {"learning_rate": 1e-3},
    "eval": {"num_prompts": 10},
    "cluster": {"backend": "local", "device": "cpu", "cpus_per_worker": 1},
    "log": {"progress": "none", "samples_every": 0, "tensorboard": False},
}


def settings(**sections: Any) -> dict[str, Any]:
    """BASE with some keys of some sections replaced."""
    return {**BASE, **{name: {**BASE.get(name, {}), **section} for name, section in sections.items()}}


def checked(folder: Path, values: dict[str, Any]) -> tuple[RunConfig, Plan]:
    config = parse_config({**values, "run": {**values["run"], "dir": str(folder)}})
    machine = find_machine(config.cluster)
    check_config(config, machine)
    return config, make_plan(config, machine)


def run(folder: Path, values: dict[str, Any], resume: bool = False) -> RunFolder:
    config, plan = checked(folder, values)
    target = RunFolder(folder) if resume else create_run_folder(config)
    train(config, plan, folder if resume else None)
    return target


class Quiet:
    """An observer that keeps the metrics."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float | None]] = {}

    def phase(self, name: str) -> None: ...

    def note(self, text: str) -> None: ...

    def metrics(self, step: int, metrics: dict[str, float | None]) -> None:
        self.rows[step] = metrics

    def samples(self, step: int, rows: Any) -> None: ...


async def opened(
    folder: Path, values: dict[str, Any], given: Given | None = None
) -> tuple[OpenRun, PromptSets, Quiet]:
    """A run with its workers up."""
    config, plan = checked(folder, values)
    target = create_run_folder(config)
    model = str(scratch_folder(config, target))
    tokenizer = load_tokenizer(model, False)
    prompts = load_prompts(config.data, tokenizer)
    quiet = Quiet()
    observer: RunObserver = quiet  # type: ignore[assignment]
    return (
        await open_run(config, plan, target, model, tokenizer, prompts.train, observer, given),
        prompts,
        quiet,
    )
