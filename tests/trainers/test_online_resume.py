"""RLOOTrainer and GRPOTrainer go on where an interrupted run stood, to the bit; what cannot is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from rl_cluster.errors import BadInputError
from rl_cluster.trainers.grpo.config import GRPOConfig
from rl_cluster.trainers.grpo.trainer import GRPOTrainer
from rl_cluster.trainers.rloo.config import RLOOConfig
from rl_cluster.trainers.rloo.trainer import RLOOTrainer
from tests.trainers.tiny import tiny_model

ROWS = [{"prompt": f"{a}{b}=", "answer": str(b)} for a in range(4) for b in range(4)]


class Crash(TrainerCallback):
    """The machine fails after this step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("power cut")


def reward(texts: list[str]) -> list[float]:
    return [float(text[3:4] == text[1]) for text in texts]


def grpo_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return reward([prompt + completion for prompt, completion in zip(prompts, completions, strict=True)])


def make(
    kind: str, folder: Path, callbacks: list[Any], rows: Any = ROWS, eval_rows: Any = ROWS[:2], **options: Any
) -> Any:
    """A fresh trainer over a fresh model of the same seed: what a script makes when it is run again."""
    policy, tokenizer = tiny_model()
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "metric_for_best_model": "reward",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "backend": "local",
        "progress": "none",
        "settings": {"cluster.cpus_per_worker": 1},
        **options,
    }
    if kind == "grpo":
        config = GRPOConfig(**common, num_generations=4, max_completion_length=2, max_steps=4, beta=0.1)
        return GRPOTrainer(policy, grpo_reward, config, rows, eval_rows, tokenizer, callbacks=callbacks)
    config = RLOOConfig(
        **common,
        total_episodes=64,
        rloo_k=4,
        response_length=2,
        num_ppo_epochs=1,
        num_mini_batches=1,
        num_sample_generations=0,
    )
    return RLOOTrainer(
        config, tokenizer, policy, None, reward, rows, eval_dataset=eval_rows, callbacks=callbacks
    )


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An RLOO run that died after its third step; its checkpoint is of the second."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with make("rloo", folder, [Crash(3)]) as trainer, pytest.raises(RuntimeError, match="power cut"):
        trainer.train()
    return folder


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_a_resumed_run_ends_as_if_nothing_had_happened(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path / "whole", [EarlyStoppingCallback(10)]) as whole:
        whole.train()
    crashing = [EarlyStoppingCallback(10), Crash(3)]
    with make(kind, tmp_path / "cut", crashing) as cut, pytest.raises(RuntimeError, match="power cut"):
        cut.train()
    stopping = EarlyStoppingCallback(10)
    with make(kind, tmp_path / "cut", [stopping]) as resumed:
        output = resumed.train(resume_from_checkpoint=True)
        assert output.global_step == whole.state.global_step
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name

    def history(trainer: Any) -> list[Any]:
        names = ("step", "eval_reward", "objective/scores", "loss/policy_avg")
        return [[row.get(name) for name in names] for row in trainer.state.log_history]

    assert history(resumed) == history(whole)
    assert resumed.state.best_metric == whole.state.best_metric
    counter = whole._hooks.callbacks[0].early_stopping_patience_counter
    assert stopping.early_stopping_patience_counter == counter
    rows = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == len((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 2e-2}, r"optimizer\.learning_rate is 0\.02 and was 0\.01"),
        ({"rows": ROWS[:8]}, "train_dataset: its prompts are not those of the run"),
        ({"eval_rows": ROWS[:3]}, "eval_dataset: its prompts are not those of the run"),
    ],
)
def test_other_settings_or_data_are_refused(interrupted: Path, options: dict[str, Any], message: str) -> None:
    before = (interrupted / "config.yaml").read_text()
    with make("rloo", interrupted, [], **options) as trainer, pytest.raises(BadInputError, match=message):
        trainer.train(resume_from_checkpoint=True)
    assert (interrupted / "config.yaml").read_text() == before


def test_a_folder_without_a_checkpoint_and_a_used_one_are_refused(interrupted: Path, tmp_path: Path) -> None:
    nothing = "resume_from_checkpoint: there is no checkpoint in"
    with make("rloo", tmp_path / "new", []) as trainer, pytest.raises(BadInputError, match=nothing):
        trainer.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    with make("rloo", interrupted, []) as trainer, pytest.raises(BadInputError, match="is not empty"):
        trainer.train()
