"""A reward that depends on the prompt is learned: the answer to `ab=` is b. The long version is in bench/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_cluster.trainers.grpo.config import GRPOConfig
from rl_cluster.trainers.grpo.trainer import GRPOTrainer
from rl_cluster.trainers.rloo.config import RLOOConfig
from rl_cluster.trainers.rloo.trainer import RLOOTrainer
from tests.trainers.tiny import tiny_model

ROWS = [{"prompt": f"{a}{b}=", "answer": str(b)} for a in range(3) for b in range(3)]
STEPS = 40


def common(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 72,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "max_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "backend": "local",
        "progress": "none",
        "settings": {"cluster.cpus_per_worker": 1},
    }


def by_texts(texts: list[str]) -> list[float]:
    return [float(text[3:4] == text[1]) for text in texts]


def by_columns(completions: list[str], answer: list[str]) -> list[float]:
    return [float(completion == a) for completion, a in zip(completions, answer, strict=True)]


@pytest.mark.parametrize("token_level_kl", [False, True])
def test_rloo_learns_to_repeat_the_last_digit(tmp_path: Path, token_level_kl: bool) -> None:
    policy, tokenizer = tiny_model()
    config = RLOOConfig(
        **common(tmp_path),
        rloo_k=8,
        response_length=1,
        num_ppo_epochs=1,
        kl_coef=0.001,
        token_level_kl=token_level_kl,
        num_sample_generations=0,
    )
    with RLOOTrainer(config, tokenizer, policy, policy, by_texts, ROWS, eval_dataset=ROWS) as trainer:
        trainer.train()
        assert trainer.evaluate()["eval_reward"] >= 0.9


@pytest.mark.parametrize("loss_type", ["dapo", "sapo"])
def test_grpo_learns_to_repeat_the_last_digit(tmp_path: Path, loss_type: str) -> None:
    model, tokenizer = tiny_model()
    args = GRPOConfig(
        **common(tmp_path),
        num_generations=8,
        max_completion_length=1,
        loss_type=loss_type,
        num_generations_eval=4,
    )
    with GRPOTrainer(model, by_columns, args, ROWS, ROWS, tokenizer) as trainer:
        trainer.train()
        assert trainer.evaluate()["eval_reward"] >= 0.9
