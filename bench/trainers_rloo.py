"""Do RLOOTrainer and GRPOTrainer learn what depends on the prompt? A table of final rewards over seeds.

    python bench/trainers_rloo.py [--task echo|addition] [--trainer rloo|rloo_token|grpo] [--seeds 3]

echo: answer with the prompt's last digit and end. addition: the last digit of a sum of two digits (0 to 4).
The policy is a char-level model with random weights; nothing is downloaded. Everything runs in this process.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from rl_cluster.config.run import ScratchModel
from rl_cluster.modeling.scratch import build_model, build_tokenizer
from rl_cluster.trainers.grpo.config import GRPOConfig
from rl_cluster.trainers.grpo.trainer import GRPOTrainer
from rl_cluster.trainers.rloo.config import RLOOConfig
from rl_cluster.trainers.rloo.trainer import RLOOTrainer

SCRATCH = ScratchModel(
    alphabet="0123456789+=",
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    intermediate_size=128,
    max_positions=16,
)


@dataclass(frozen=True)
class Task:
    """rows: prompt and answer. steps: updates, of 256 completions each, that suffice."""

    rows: list[dict[str, str]]
    steps: int


def echo() -> Task:
    pairs = itertools.product(range(10), range(10))
    return Task([{"prompt": f"{a}{b}=", "answer": str(b)} for a, b in pairs], steps=180)


def addition() -> Task:
    pairs = itertools.product(range(5), range(5))
    return Task([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs], steps=600)


TASKS = {"echo": echo, "addition": addition}


def score(prompt: str, response: str, answer: str) -> float:
    """1 for exactly the answer, half of it for an answer with something behind it."""
    return 1.0 if response == answer else 0.5 if response.startswith(answer) else 0.0


def arguments(seed: int, folder: str, steps: int, learning_rate: float) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 256,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "linear",
        "temperature": 1.0,
        "seed": seed,
        "eval_strategy": "steps",
        "eval_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
        "progress": "none",
        "settings": {"cluster.cpus_per_worker": 1},
        "backend": "local",
        "use_cpu": True,
    }


def make_rloo(task: Task, seed: int, folder: str, steps: int, token_level_kl: bool) -> RLOOTrainer:
    tokenizer = build_tokenizer(SCRATCH.alphabet, SCRATCH.max_positions)
    policy = build_model(SCRATCH, len(tokenizer), seed)
    answers = {row["prompt"]: row["answer"] for row in task.rows}

    def reward(texts: list[str]) -> list[float]:
        cut = [(text[: text.index("=") + 1], text[text.index("=") + 1 :]) for text in texts]
        return [score(prompt, response, answers[prompt]) for prompt, response in cut]

    config = RLOOConfig(
        **arguments(seed, folder, steps, 1e-3),
        total_episodes=256 * steps,
        rloo_k=8,
        response_length=2,
        num_ppo_epochs=1,
        num_mini_batches=1,
        kl_coef=0.05,
        normalize_advantage=True,
        token_level_kl=token_level_kl,
        num_sample_generations=0,
    )
    return RLOOTrainer(config, tokenizer, policy, policy, reward, task.rows, eval_dataset=task.rows)


def make_grpo(task: Task, seed: int, folder: str, steps: int) -> GRPOTrainer:
    tokenizer = build_tokenizer(SCRATCH.alphabet, SCRATCH.max_positions)
    model = build_model(SCRATCH, len(tokenizer), seed)

    def reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        return [score(*sample) for sample in zip(prompts, completions, answer, strict=True)]

    config = GRPOConfig(
        **arguments(seed, folder, steps, 2e-3),
        max_steps=steps,
        num_generations=8,
        num_generations_eval=2,
        max_completion_length=2,
    )
    return GRPOTrainer(model, reward, config, task.rows, task.rows, tokenizer)


def make(trainer: str, task: Task, seed: int, folder: str, steps: int) -> RLOOTrainer | GRPOTrainer:
    if trainer == "grpo":
        return make_grpo(task, seed, folder, steps)
    return make_rloo(task, seed, folder, steps, token_level_kl=trainer == "rloo_token")


def final_reward(trainer: str, name: str, seed: int, steps: int | None = None) -> tuple[float, float, float]:
    """(before, after, seconds): mean score on all prompts; 1 is the most."""
    task = TASKS[name]()
    folder = tempfile.mkdtemp()
    start = time.perf_counter()
    try:
        with make(trainer, task, seed, f"{folder}/run", steps or task.steps) as made:
            made.train()
            scores = [row["eval_reward"] for row in made.state.log_history if "eval_reward" in row]
    finally:
        shutil.rmtree(folder)
    return scores[0], scores[-1], time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--trainer", choices=("rloo", "rloo_token", "grpo"), action="append")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    print("| task | trainer | seed | before | after | seconds |\n|---|---|---:|---:|---:|---:|")
    for name in options.task or TASKS:
        for trainer in options.trainer or ("rloo", "rloo_token", "grpo"):
            for seed in range(options.seeds):
                before, after, seconds = final_reward(trainer, name, seed, options.steps)
                print(
                    f"| {name} | {trainer} | {seed} | {before:.3f} | {after:.3f} | {seconds:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
