"""Trainers after one another on one small model: SFT → reward model → PPO, and SFT → DPO → PPO.

    python bench/combining_trainers.py [--seeds 3] [--first-seed 0] [--iterations 80]

The task: answer a number of three digits with its last digit. Demonstrations are right about four times in
ten, so that imitation alone cannot do it. The score is exact: the mean probability that a sample (temperature
1) of a held-out prompt is the right digit followed by the end token. All runs in this process.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rl_cluster
from rl_cluster.config.run import ScratchModel
from rl_cluster.modeling.scratch import build_model, build_tokenizer

SCRATCH = ScratchModel(
    alphabet="0123456789>",
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    intermediate_size=128,
    max_positions=16,
)
RIGHT_DEMONSTRATIONS = 0.4
NUM_TRAIN, NUM_HELD_OUT = 300, 100
QUIET: dict[str, Any] = {"progress": "none", "backend": "local"}
FIT: dict[str, Any] = {
    "max_length": 8,
    "max_prompt_length": 5,
    "batch_size": 20,
    "gradient_accumulation_steps": 1,
    "eval_every": 0,
    "save_every": 0,
    "report_to": "none",
    **QUIET,
}


@dataclass(frozen=True)
class Task:
    """rows: prompt and answer. held_out shares no prompt with train."""

    train: list[dict[str, str]]
    held_out: list[dict[str, str]]


@dataclass(frozen=True)
class Stage:
    """score: of the policy on held-out prompts, of a reward model its accuracy on held-out pairs."""

    name: str
    before: float | None
    after: float
    seconds: float


def make_task(seed: int) -> Task:
    numbers = random.Random(seed).sample(range(1000), NUM_TRAIN + NUM_HELD_OUT)
    rows = [{"prompt": f"{number:03}>", "answer": str(number % 10)} for number in numbers]
    return Task(rows[:NUM_TRAIN], rows[NUM_TRAIN:])


def pairs(rows: list[dict[str, str]], seed: int, end: int) -> list[dict[str, Any]]:
    """Per prompt: the answer above five other digits, three longer responses, and none at all (only `end`).

    Without the last four a reward model never sees such responses, and PPO finds out that it likes them.
    """
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    for row in rows:
        right = row["answer"]
        wrong: list[Any] = draw.sample([digit for digit in "0123456789" if digit != right], 5)
        wrong += [first + draw.choice(SCRATCH.alphabet) for first in (right, draw.choice("0123456789"), ">")]
        wrong.append([end])
        found += [{"prompt": row["prompt"], "chosen": right, "rejected": other} for other in wrong]
    return found


@torch.no_grad()
def score(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Mean over the rows of p(answer, end token | prompt)."""
    ids = torch.tensor([tokenizer(row["prompt"] + row["answer"])["input_ids"] for row in rows])
    prompt = ids.shape[1] - 1
    logprobs = model.eval()(ids).logits.log_softmax(-1)
    answer = logprobs[torch.arange(len(rows)), prompt - 1, ids[:, prompt]]
    end = logprobs[:, prompt, tokenizer.eos_token_id]
    return float((answer + end).exp().mean())


@dataclass
class Chain:
    """What the stages share. folder: for their runs."""

    task: Task
    seed: int
    folder: Path
    iterations: int

    def __post_init__(self) -> None:
        self.tokenizer = build_tokenizer(SCRATCH.alphabet, SCRATCH.max_positions)
        self.stages: list[Stage] = []

    def sft(self) -> Any:
        """A policy that imitates demonstrations, most of which are wrong."""
        model = build_model(SCRATCH, len(self.tokenizer), self.seed)
        draw = random.Random(self.seed)
        rows = []
        for row in self.task.train:
            for _ in range(2):
                right = draw.random() < RIGHT_DEMONSTRATIONS
                answer = row["answer"] if right else draw.choice("0123456789")
                rows.append({"prompt": row["prompt"], "completion": answer})
        config = rl_cluster.SFTConfig(learning_rate=3e-3, num_epochs=6, output_dir=self._run("sft"), **FIT)
        before, start = self._score(model), time.perf_counter()
        rl_cluster.SFTTrainer(config, model, self.tokenizer).train(rows)
        self._note("SFT", before, self._score(model), start)
        return model

    def reward_model(self, policy: Any) -> Any:
        """A classifier on the policy's trunk, from preference pairs of the training prompts."""
        config = rl_cluster.RewardConfig(
            learning_rate=3e-3, num_epochs=4, output_dir=self._run("reward"), seed=self.seed, **FIT
        )
        start = time.perf_counter()
        trainer = rl_cluster.RewardTrainer(config, copy.deepcopy(policy), self.tokenizer)
        trainer.train(self._pairs(self.task.train))
        accuracy = trainer.evaluate(self._pairs(self.task.held_out))["eval_accuracy"]
        assert accuracy is not None
        self._note("reward model", None, accuracy, start)
        return trainer.model

    def dpo(self, policy: Any) -> Any:
        """The policy after a little DPO on pairs of the training prompts."""
        config = rl_cluster.DPOConfig(
            learning_rate=5e-4, num_epochs=1, output_dir=self._run("dpo"), seed=self.seed, **FIT
        )
        before, start = self._score(policy), time.perf_counter()
        trained = rl_cluster.DPOTrainer(config, copy.deepcopy(policy), self.tokenizer)
        model = trained.train_on_preferences(self._pairs(self.task.train))
        self._note("DPO", before, self._score(model), start)
        return model

    def ppo(self, policy: Any, reward_fn: Any, name: str) -> Any:
        config = rl_cluster.PPOConfig(
            learning_rate=1e-3,
            batch_size=80,
            mini_batch_size=80,
            ppo_epochs=2,
            gamma=1.0,
            kl_penalty_coef=0.01,
            adap_kl_ctrl=False,
            entropy_coef=0.0,
            max_new_tokens=2,
            temperature=1.0,
            num_iterations=self.iterations,
            samples_per_prompt=2,
            missing_eos_penalty=1.0,
            normalize_rewards="running",
            save_every=0,
            seed=self.seed,
            output_dir=self._run(name),
            **QUIET,
        )
        before, start = self._score(policy), time.perf_counter()
        with rl_cluster.PPOTrainer(
            config, copy.deepcopy(policy), self.tokenizer, reward_fn=reward_fn
        ) as trainer:
            model = trainer.train(self.task.train).model
        self._note(name, before, self._score(model), start)
        return model

    def _pairs(self, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
        return pairs(rows, self.seed, self.tokenizer.eos_token_id)

    def _run(self, name: str) -> str:
        return str(self.folder / name.replace(" ", "-"))

    def _score(self, model: Any) -> float:
        return score(model, self.tokenizer, self.task.held_out)

    def _note(self, name: str, before: float | None, after: float, start: float) -> None:
        stage = Stage(name, before, after, time.perf_counter() - start)
        self.stages.append(stage)
        shown = "     " if before is None else f"{before:.3f}"
        print(f"seed {self.seed}  {name:<24} {shown} → {after:.3f}  ({stage.seconds:.0f} s)", flush=True)


def is_right(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """1 for the answer and nothing else, half for an answer with something behind it."""
    return [
        1.0 if response == row["answer"] else 0.5 * response.startswith(row["answer"])
        for response, row in zip(responses, metadata, strict=True)
    ]


def run_chain(seed: int, iterations: int) -> list[Stage]:
    """All stages of both chains; the second begins from the same imitation as the first."""
    folder = Path(tempfile.mkdtemp())
    try:
        chain = Chain(make_task(seed), seed, folder, iterations)
        policy = chain.sft()
        judge = chain.reward_model(policy)
        chain.ppo(policy, judge, "PPO on the reward model")
        better = chain.dpo(policy)
        chain.ppo(better, is_right, "PPO after DPO")
        return chain.stages
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=80, help="of each PPO")
    asked = parser.parse_args()
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        run_chain(seed, asked.iterations)


if __name__ == "__main__":
    main()
