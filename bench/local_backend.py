"""Seconds per PPO iteration of a small model: the local backend, and the Ray backend beside it.

    python -m bench.local_backend [--ray] [--iterations 20] [--threads 1]

16 prompts × 1 sample, 32 new tokens each (the model has no end token), 4 epochs of --mini-batches updates
(1: as the original, which reads no mini-batch size; 4: as PPOConfig says), a critic on the policy's trunk,
token-wise KL to a frozen reference; a char-level Qwen2 of 0.6 M parameters. The
first iterations are left out (lazy initialisation). CPU seconds are this process's own, all threads together:
on a busy machine they say more than the wall clock; of the Ray backend they are the driver's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.plain_ppo import PlainPPO
from rl_cluster.assembly.given import Given
from rl_cluster.assembly.run import open_run
from rl_cluster.assembly.train import load_tokenizer, quieten_libraries, worker_session
from rl_cluster.config.checks.run import check_config
from rl_cluster.config.planning.machine import find_machine
from rl_cluster.config.planning.plan import make_plan
from rl_cluster.config.reading.load import parse_config
from rl_cluster.config.run import ScratchModel
from rl_cluster.data.load import load_prompts
from rl_cluster.loop.hooks import Wishes
from rl_cluster.metrics.observer import open_observer
from rl_cluster.modeling.scratch import save_scratch_model
from rl_cluster.run_folder.folder import create_run_folder

WARM_UP = 3
STAGES = ("perf/generate_seconds", "perf/reference_seconds", "perf/train_seconds")
ORIGINAL_SECONDS = 0.225
"""AITraining's own PPO arithmetic on the same sizes, patched so that it runs; of which 0.08 s generation."""


class Clock:
    """A hook: wall and CPU seconds of each iteration."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.rows: list[Mapping[str, float | None]] = []
        self._last = (0.0, 0.0)

    def on_begin(self, step: int, last_step: int, folder: Path) -> None:
        self._last = time.perf_counter(), time.process_time()

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> Wishes:
        now = time.perf_counter(), time.process_time()
        if step > WARM_UP:
            self.wall.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
            self.rows.append(metrics)
        self._last = now
        return Wishes()

    def on_evaluate(self, step: int, metrics: Mapping[str, float | None]) -> Wishes:
        return Wishes()

    def on_save(self, step: int, checkpoint: Path) -> None: ...

    def on_end(self, step: int) -> None: ...


def settings(
    backend: str, model: Path, folder: Path, iterations: int, threads: int, mini_batches: int
) -> dict[str, Any]:
    return {
        "run": {"steps": iterations + WARM_UP, "dir": str(folder), "seed": 1},
        "model": {"path": str(model)},
        "data": {"train": {"source": "addition"}, "held_out": 0, "max_prompt_tokens": 32},
        "rewards": {"scorers": [{"kind": "exact_match"}]},
        "batch": {"prompts_per_step": 16, "samples_per_prompt": 1},
        "rollout": {"max_new_tokens": 32, "temperature": 0.7, "kv_cache_gib": 0.1},
        "algorithm": {"name": "ppo", "num_epochs": 4, "num_mini_batches": mini_batches},
        "optimizer": {"learning_rate": 1e-5},
        "cluster": {"backend": backend, "device": "cpu", "cpus_per_worker": threads},
        "log": {"progress": "none", "samples_every": 0, "tensorboard": False},
    }


def save_endless_model(folder: Path) -> None:
    """The scratch model with an end token that it has no logit for: every response has its 32 tokens."""
    save_scratch_model(ScratchModel(), folder)
    tokenizer = load_tokenizer(str(folder), False)
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "eos_token_id": None}))


async def measure(
    backend: str, model: Path, folder: Path, iterations: int, threads: int, mini_batches: int
) -> Clock:
    """A run of the ordinary loop with a clock that hooks into it."""
    config = parse_config(settings(backend, model, folder, iterations, threads, mini_batches))
    machine = find_machine(config.cluster)
    check_config(config, machine)
    plan = make_plan(config, machine)
    run_folder, clock = create_run_folder(config), Clock()
    tokenizer = load_tokenizer(str(model), False)
    prompts = load_prompts(config.data, tokenizer)
    with open_observer(config, run_folder, None) as observer, worker_session(config, plan):
        given = Given(hooks=(clock,))
        run = await open_run(config, plan, run_folder, str(model), tokenizer, prompts.train, observer, given)
        try:
            await run.train(prompts, config.run.steps)
        finally:
            await run.close()
    return clock


def measure_plain(model: Path, iterations: int, threads: int, mini_batches: int) -> Clock:
    """The same arithmetic as a plain loop, on the same machine in the same minute."""
    clock, plain = Clock(), PlainPPO(model, load_tokenizer(str(model), False), threads, mini_batches)
    for number in range(WARM_UP + iterations):
        wall, cpu = plain.iteration()
        if number >= WARM_UP:
            clock.wall.append(wall)
            clock.cpu.append(cpu)
    return clock


def line(name: str, clock: Clock) -> str:
    numbers = [statistics.median(clock.wall), min(clock.wall), statistics.median(clock.cpu), min(clock.cpu)]
    if clock.rows:
        numbers += [statistics.median(row[stage] or 0.0 for row in clock.rows) for stage in STAGES]
    cells = [f"{number:.3f}" for number in numbers] + ["-"] * (4 + len(STAGES) - len(numbers))
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ray", action="store_true", help="the Ray backend as well")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--mini-batches", type=int, default=1, help="per epoch")
    options = parser.parse_args()
    quieten_libraries("cpu")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        save_endless_model(Path(name) / "model")
        clock = measure_plain(Path(name) / "model", options.iterations, options.threads, options.mini_batches)
        rows.append(line("plain loop", clock))
        for backend in ("local", "ray") if options.ray else ("local",):
            clock = asyncio.run(
                measure(
                    backend,
                    Path(name) / "model",
                    Path(name) / backend,
                    options.iterations,
                    options.threads,
                    options.mini_batches,
                )
            )
            rows.append(line(backend, clock))
    print(f"the original: {ORIGINAL_SECONDS} s per iteration on a quiet machine of 2 cores")
    print("| | median s | fastest s | median CPU s | least CPU s | generation s | reference s | training s |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
