"""From a front's settings, none at its default, to the config.yaml of its run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import rl_cluster
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.reading.load import load_as
from rl_cluster.trainers.fixed_data.settings import FitSettings, fit_config
from tests.trainers.test_fit_fronts import SMALL, TOKENIZER, model, pairs

ROWS = pairs(slice(0, 12))
COMPLETIONS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in ROWS]
LABELLED = [{**row, "label": i % 2 == 0} for i, row in enumerate(COMPLETIONS)]

FRONTS: list[tuple[str, Any, Any, dict[str, Any], dict[str, Any]]] = [
    (
        "DPO",
        rl_cluster.DPOTrainer,
        rl_cluster.DPOConfig,
        {"beta": 0.3, "loss_type": "hinge", "reference_free": True},
        {"name": "dpo", "beta": 0.3, "loss": "hinge", "reference_free": True, "label_smoothing": 0.0},
    ),
    (
        "smoothed DPO",
        rl_cluster.DPOTrainer,
        rl_cluster.DPOConfig,
        {"label_smoothing": 0.2},
        {"name": "dpo", "beta": 0.1, "loss": "sigmoid", "reference_free": False, "label_smoothing": 0.2},
    ),
    ("ORPO", rl_cluster.ORPOTrainer, rl_cluster.ORPOConfig, {"beta": 0.6}, {"name": "orpo", "coef": 0.6}),
    (
        "KTO",
        rl_cluster.KTOTrainer,
        rl_cluster.KTOConfig,
        {"beta": 0.4, "desirable_weight": 0.7, "undesirable_weight": 1.3},
        {"name": "kto", "beta": 0.4, "desirable_weight": 0.7, "undesirable_weight": 1.3},
    ),
    (
        "reward",
        rl_cluster.RewardTrainer,
        rl_cluster.RewardConfig,
        {"margin": 0.2, "center_rewards_coefficient": 0.03},
        {"name": "reward", "margin": 0.2, "centre": 0.03},
    ),
]


@pytest.mark.parametrize(
    ("trainer", "config", "settings", "expected"), [f[1:] for f in FRONTS], ids=[f[0] for f in FRONTS]
)
def test_every_setting_of_a_front_stands_in_the_configuration_of_its_run(
    trainer: Any, config: Any, settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    own = SMALL | {"batch_size": 2, "gradient_accumulation_steps": 3, "output_dir": str(tmp_path / "run")}
    rows = LABELLED if expected["name"] == "kto" else ROWS
    history = trainer(config(**own, **settings), model(), TOKENIZER).train(rows)
    saved = load_as(FitConfig, tmp_path / "run" / "config.yaml")
    objective = saved.objective.model_dump()
    assert {name: objective[name] for name in expected} == expected
    assert set(objective) - set(expected) <= {"reference_model"}
    assert saved.batch.rows_per_step == 2 * 3
    assert len(history["loss"]) == 2, "12 examples, 6 to a step"


def test_every_common_setting_becomes_the_field_of_its_meaning() -> None:
    settings = FitSettings(
        learning_rate=3e-4,
        batch_size=3,
        gradient_accumulation_steps=5,
        num_epochs=7,
        max_grad_norm=0.3,
        weight_decay=0.02,
        warmup_ratio=0.15,
        lr_scheduler_type="cosine",
        max_length=64,
        max_prompt_length=32,
        eval_every=11,
        save_every=13,
        device="cpu",
        seed=17,
        bf16=True,
        gradient_checkpointing=True,
        lora_rank=4,
        lora_alpha=9.0,
        lora_dropout=0.1,
        num_ranks=1,
        cpus_per_worker=1,
        tokens_per_micro_batch=99,
        backend="local",
        output_dir="somewhere",
        progress="none",
        report_to="wandb",
    )
    plain = FitSettings()
    same = {f.name for f in fields(FitSettings) if getattr(settings, f.name) == getattr(plain, f.name)}
    assert same == {"model_name", "num_ranks"}
    config = fit_config(settings, rl_cluster.config.fit.ORPO(coef=0.5), "folder", 1000)
    assert (config.run.dir, config.run.seed, config.run.epochs) == ("somewhere", 17, 7)
    assert (config.model.path, config.model.dtype) == ("folder", "bfloat16")
    assert config.model.gradient_checkpointing
    lora = config.model.lora
    assert lora is not None and (lora.rank, lora.alpha, lora.dropout) == (4, 9.0, 0.1)
    assert (config.data.max_length, config.data.max_prompt_length) == (64, 32)
    assert config.batch.rows_per_step == 3 * 5
    assert config.batch.tokens_per_micro_batch == 99
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay) == (3e-4, 0.02)
    assert (optimizer.max_grad_norm, optimizer.schedule) == (0.3, "cosine")
    assert config.warmup_ratio == 0.15
    assert (config.cluster.backend, config.cluster.device, config.cluster.cpus_per_worker) == (
        "local",
        "cpu",
        1,
    )
    assert (config.eval.every, config.checkpoint.every) == (11, 13)
    assert (config.log.tensorboard, config.log.wandb_project, config.log.progress) == (
        False,
        "rl_cluster",
        "none",
    )
    many = fit_config(FitSettings(num_ranks=2), rl_cluster.config.fit.ORPO(), "folder", 1000)
    assert (many.learner.num_ranks, many.cluster.backend) == (2, "ray")
    assert (many.log.tensorboard, many.log.wandb_project, many.model.lora) == (True, None, None)
