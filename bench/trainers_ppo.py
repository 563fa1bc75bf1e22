"""Does PPOTrainer learn what depends on the prompt, and what does an iteration cost?

    python bench/trainers_ppo.py [--task echo addition] [--seeds 3] [--iterations N]
    python bench/trainers_ppo.py --speed

echo: answer with the prompt's last digit and end. addition: the sum of two digits of 0 to 4, and end. The
policy is a char-level model with random weights; nothing is downloaded; everything runs in this process, with
one thread. --speed: batch 16, 32 new tokens, 4 epochs, 0.53 M parameters; median seconds per iteration.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from typing import Any

from rl_cluster.config.run import ScratchModel
from rl_cluster.modeling.scratch import build_model, build_tokenizer
from rl_cluster.trainers.ppo.config import PPOConfig
from rl_cluster.trainers.ppo.trainer import PPOTrainer

SCRATCH = ScratchModel(
    alphabet="0123456789+=",
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    intermediate_size=128,
    max_positions=16,
)
SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-3,
    "learning_rate_schedule": "linear",
    "batch_size": 256,
    "mini_batch_size": 128,
    "ppo_epochs": 2,
    "gamma": 1.0,
    "kl_penalty_coef": 0.003,
    "kl_target": 6.0,
    "temperature": 1.0,
    "max_new_tokens": 2,
    "save_every": 0,
    "eval_every": 0,
    "backend": "local",
    "device": "cpu",
    "progress": "none",
    "settings": {"cluster.cpus_per_worker": 1},
}
ITERATIONS = {"echo": 80, "addition": 150}


def rows_of(task: str) -> list[dict[str, str]]:
    if task == "echo":
        return [{"prompt": f"{a}{b}=", "answer": str(b)} for a, b in itertools.product(range(10), range(10))]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in itertools.product(range(5), range(5))]


def reward(prompts: list[str], responses: list[str], metadata: list[dict[str, str]]) -> list[float]:
    """1 for exactly the answer, half of it for an answer with something behind it."""
    answers = [row["answer"] for row in metadata]
    return [
        1.0 if response == answer else 0.5 if response.startswith(answer) else 0.0
        for response, answer in zip(responses, answers, strict=True)
    ]


def learn(task: str, seed: int, iterations: int) -> dict[str, float]:
    """Mean reward of the first and of the last five iterations, of all prompts at the end, and seconds."""
    tokenizer = build_tokenizer(SCRATCH.alphabet, SCRATCH.max_positions)
    model = build_model(SCRATCH, len(tokenizer), seed)
    rows = rows_of(task)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(**SETTINGS, seed=seed, num_iterations=iterations, output_dir=f"{folder}/run")
        with PPOTrainer(config, model, tokenizer, reward, eval_prompts=rows) as trainer:
            rewards = trainer.train(rows)["rewards"]
            final = trainer.evaluate()["eval/score_mean"]
    assert final is not None
    first, last = (statistics.mean(part) for part in (rewards[:5], rewards[-5:]))  # type: ignore[type-var]
    return {"first": first, "last": last, "final": final, "seconds": time.perf_counter() - begun}


def speed(iterations: int) -> dict[str, float]:
    """Median seconds of an iteration and of its parts, after three to warm up."""
    scratch = ScratchModel()
    tokenizer = build_tokenizer(scratch.alphabet, scratch.max_positions)
    prompts = [f"{a}+{b}=" for a, b in itertools.product(range(10), range(10))]
    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(
            max_new_tokens=32,
            num_iterations=iterations,
            save_every=0,
            backend="local",
            device="cpu",
            progress="none",
            output_dir=f"{folder}/run",
        )
        model = build_model(scratch, len(tokenizer), 0)
        with PPOTrainer(config, model, tokenizer, lambda texts: [float(len(t)) for t in texts]) as trainer:
            trainer.train(prompts, 3)
            begun = time.perf_counter()
            trainer.train(prompts, iterations)
            whole = (time.perf_counter() - begun) / iterations
            log = trainer._run.log.rows[3:]
    names = ("perf/step_seconds", "perf/generate_seconds", "perf/train_seconds")
    medians = {name: statistics.median(row[name] or 0.0 for row in log) for name in names}
    return {"train() seconds / iteration": whole, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=sorted(ITERATIONS), default=sorted(ITERATIONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=None)
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    if options.speed:
        print(json.dumps(speed(options.iterations or 20), indent=2))
        return
    print("| task | seed | reward, first 5 iterations | last 5 | all prompts at the end | seconds |")
    print("|---|---:|---:|---:|---:|---:|")
    for task, seed in itertools.product(options.task, range(options.seeds)):
        result = learn(task, seed, options.iterations or ITERATIONS[task])
        numbers = " | ".join(f"{result[name]:.3f}" for name in ("first", "last", "final"))
        print(f"| {task} | {seed} | {numbers} | {result['seconds']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
