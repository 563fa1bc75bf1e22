"""Every field of every configuration changes what becomes of it, is refused, or is listed as idle."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import rl_cluster
from rl_cluster.cli import llm_fit, llm_run
from rl_cluster.cli.fields_page import fields_page
from rl_cluster.cli.llm_flags import ACTS_FOR
from rl_cluster.errors import BadInputError
from rl_cluster.trainers import without_effect
from rl_cluster.trainers.arguments import ARGUMENTS
from rl_cluster.trainers.fields import Elsewhere, Table, paths_of
from rl_cluster.trainers.fixed_data.settings import FIT as FIT_FIELDS
from rl_cluster.trainers.grpo.run_config import GRPO as GRPO_FIELDS
from rl_cluster.trainers.ppo.arguments import read_arguments
from rl_cluster.trainers.ppo.run import Opening, PPORun
from rl_cluster.trainers.ppo.run_config import PPO as PPO_FIELDS
from rl_cluster.trainers.ppo.run_config import ppo_run_config
from rl_cluster.trainers.rloo.run_config import RLOO as RLOO_FIELDS
from tests.trainers.every_field import (
    BESIDE,
    FIT,
    FIT_OWN,
    FIT_ROWS,
    GRPO,
    RLOO,
    TRAINING_ARGUMENTS,
    field_names,
    made_of_fit,
    made_of_online,
    save_models,
)
from tests.trainers.test_ppo_config import OTHER_VALUES
from tests.trainers.tiny import tiny_model

OWN = {"RLOO": RLOO, "GRPO": GRPO}
LISTED = {"RLOO": without_effect.RLOO, "GRPO": without_effect.GRPO}
MODELS = {"sft_model_path", "reward_model_path"}


def test_every_field_of_the_online_configurations_has_a_value() -> None:
    assert set(TRAINING_ARGUMENTS) == field_names(TrainingArguments)
    for kind, own in OWN.items():
        names = field_names(getattr(rl_cluster, f"{kind}Config")) - field_names(TrainingArguments)
        assert names - MODELS == set(own), kind


TABLES: dict[str, Table] = {"RLOO": {**ARGUMENTS, **RLOO_FIELDS}, "GRPO": {**ARGUMENTS, **GRPO_FIELDS}}


def differs(before: Any, after: Any, path: str) -> bool:
    """Whether two dumped runs differ in a setting."""
    values = []
    for (run, *_), _ in (before, after):
        for part in path.split("."):
            run = None if run is None else run[part]
        values.append(run)
    return values[0] != values[1]


ONLINE = [(kind, name) for kind, own in OWN.items() for name in (*TRAINING_ARGUMENTS, *own)]


@pytest.mark.parametrize(("kind", "name"), ONLINE)
def test_a_field_of_the_online_configurations_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    value = (TRAINING_ARGUMENTS | OWN[kind])[name]
    beside = BESIDE.get(name, {})
    always = name in without_effect.TRAINING_ARGUMENTS or name in LISTED[kind]
    before = made_of_online(kind, tmp_path / "run", beside)
    refusals = (BadInputError, ValueError, ImportError) if name in THEIRS else (BadInputError,)
    try:
        after = made_of_online(kind, tmp_path / "run", beside | {name: value})
    except refusals:
        return
    assert after != before or always, f"{name} does nothing and stands in no list"
    claimed = paths_of(TABLES[kind].get(name, Elsewhere("")))
    changed = [path for path in claimed if differs(before, after, path)]
    assert changed or always or not claimed, f"{name} changes none of {claimed}"
    if name in without_effect.TRAINING_ARGUMENTS:
        assert after == before, f"{name} is listed as without effect, and has one"


THEIRS = {"tf32", "torch_compile", "torch_compile_mode", "torch_compile_backend", "fp16", "fp16_full_eval"}
THEIRS |= {"dataloader_prefetch_factor"}
"""transformers itself refuses them on a machine without a GPU, or without another setting."""


CONDITIONAL: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("RLOO", "reward_clip_range", 3.0, {"normalize_reward": True}),
    ("RLOO", "num_train_epochs", 9.0, {}),
    ("GRPO", "sapo_temperature_neg", 2.0, {"loss_type": "sapo"}),
    ("GRPO", "sapo_temperature_pos", 2.0, {"loss_type": "sapo"}),
    ("GRPO", "num_completions_to_print", 2, {"log_completions": True}),
    ("GRPO", "num_generations_eval", 3, {"eval_strategy": "steps"}),
    ("GRPO", "vllm_gpu_memory_utilization", 0.3, {"backend": "ray"}),
    ("GRPO", "num_train_epochs", 9.0, {}),
]


@pytest.mark.parametrize(("kind", "name", "value", "beside"), CONDITIONAL)
def test_a_field_that_is_listed_with_a_condition_acts_otherwise(
    tmp_path: Path, kind: str, name: str, value: Any, beside: dict[str, Any]
) -> None:
    before, after = (made_of_online(kind, tmp_path, beside | given) for given in ({}, {name: value}))
    assert after != before


def test_models_by_name_act_where_the_trainer_is_given_none(tmp_path: Path) -> None:
    save_models(tmp_path)

    def made(**given: Any) -> Any:
        usual = {"sft_model_path": str(tmp_path / "a"), "reward_model_path": str(tmp_path / "score-a")}
        config = rl_cluster.RLOOConfig(
            output_dir=str(tmp_path / "run"),
            report_to="none",
            use_cpu=True,
            response_length=2,
            **usual | given,
        )
        trainer = rl_cluster.RLOOTrainer(config, train_dataset=[{"prompt": "1="}])
        return trainer._run.policy.source, trainer.config.rewards

    assert made(sft_model_path=str(tmp_path / "b")) != made()
    assert made(reward_model_path=str(tmp_path / "score-b")) != made()


def test_every_field_stands_in_the_table_of_its_front() -> None:
    fits = [getattr(rl_cluster, f"{kind}Config") for kind in FIT_OWN]
    shared = set.intersection(*map(field_names, fits))
    assert set(FIT_FIELDS) == shared and field_names(rl_cluster.PPOConfig) == set(PPO_FIELDS)
    assert set(llm_run.RUN) | set(llm_fit.FIT) <= set(ACTS_FOR)


def test_the_page_of_fields_is_printed_from_the_tables() -> None:
    assert (Path(__file__).parents[2] / "docs" / "fields.md").read_text() == fields_page()


def test_every_field_of_the_fits_has_a_value() -> None:
    for kind, own in FIT_OWN.items():
        assert field_names(getattr(rl_cluster, f"{kind}Config")) == {*FIT, *own, "model_name"}


@pytest.mark.parametrize(("kind", "name"), [(k, name) for k, own in FIT_OWN.items() for name in (*FIT, *own)])
def test_a_field_of_the_fits_acts(kind: str, name: str) -> None:
    beside = {"lora_rank": 2} if name.startswith("lora_") else {}
    before = made_of_fit(kind, beside)
    assert made_of_fit(kind, beside | {name: (FIT | FIT_OWN[kind])[name]}) != before


@pytest.mark.parametrize("kind", FIT_ROWS)
@pytest.mark.parametrize("name", ["lora_alpha", "lora_dropout", "no_such", "bf16", "report_to", "output_dir"])
def test_a_setting_of_a_fit_that_cannot_act_is_refused(kind: str, name: str) -> None:
    wrong = {"lora_alpha": 8.0, "lora_dropout": 0.1, "bf16": "yes", "report_to": "mlflow", "output_dir": 3}
    config = getattr(rl_cluster, f"{kind}Config")()
    policy, tokenizer = tiny_model()
    with pytest.raises(BadInputError, match=rf"{kind}Config\.{name}="):
        setattr(config, name, wrong.get(name, 1))
        getattr(rl_cluster, f"{kind}Trainer")(config, policy, tokenizer)


@pytest.mark.parametrize("kind", FIT_ROWS)
def test_a_model_by_name_acts_where_the_trainer_is_given_none(kind: str) -> None:
    config = getattr(rl_cluster, f"{kind}Config")(model_name="owner/model")
    trainer = getattr(rl_cluster, f"{kind}Trainer")
    policy, tokenizer = tiny_model()
    assert trainer(config, tokenizer=tokenizer).model == "owner/model"
    assert trainer(config, policy, tokenizer).model is policy


@pytest.mark.parametrize("loss_type", ["ipo", "hinge"])
def test_label_smoothing_of_a_loss_without_it_is_refused(loss_type: Any) -> None:
    policy, tokenizer = tiny_model()
    config = rl_cluster.DPOConfig(loss_type=loss_type, label_smoothing=0.3)
    with pytest.raises(
        BadInputError, match=rf"label_smoothing=0\.3: has no meaning for loss_type='{loss_type}'"
    ):
        rl_cluster.DPOTrainer(config, policy, tokenizer)


PPO_ELSEWHERE = {
    "model_name": "b",
    "backend": "ray",
    "cluster": "10.0.0.1:6379",
    "output_dir": "elsewhere",
    "reward_timeout_seconds": 7.0,
    "target_kl": 3.0,
    "epochs": 3,
}
PPO_BESIDE = {"target_kl": {"early_stopping": True}}


def made_of_ppo(given: dict[str, Any]) -> Any:
    """The run and where it works, of a PPOConfig whose model is a folder."""
    _, tokenizer = tiny_model()
    # Small enough for the model's 32 positions.
    config = rl_cluster.PPOConfig(**{"model_name": "a", "max_new_tokens": 8, **given})
    nothing = dict.fromkeys(("model", "ref_model", "dataset"))
    reward = lambda prompts, responses: [0.0] * len(prompts)  # noqa: E731
    arguments = read_arguments(config, (), {**nothing, "tokenizer": tokenizer, "reward_fn": reward})
    run = PPORun(arguments, ())
    backend = run._backend()
    place = dataclasses.replace(run._place(Opening([]), backend), eval_path="eval.jsonl")
    return ppo_run_config(config, place).model_dump(), os.environ.get("RAY_ADDRESS")


@pytest.mark.parametrize("name", [*PPO_FIELDS, "clip_param"])
def test_a_field_of_ppo_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    save_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "")
    value = 12 if name == "max_prompt_length" else (OTHER_VALUES | PPO_ELSEWHERE)[name]
    beside = PPO_BESIDE.get(name, {})
    before = made_of_ppo(beside)
    after = made_of_ppo(beside | {name: value})
    assert after != before or name == "epochs"
    assert "epochs" in without_effect.PPO


REWARD_MODEL = {
    "model_name": "b",
    "num_labels": 2,
    "pooling_strategy": "mean",
    "dropout_prob": 0.5,
    "temperature": 2.0,
    "use_lora": True,
    "lora_rank": 2,
    "lora_alpha": 4,
    "lora_dropout": 0.5,
    "learning_rate": 1e-2,
    "warmup_steps": 1,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 1e-3,
    "seed": 3,
    "dtype": "bfloat16",
}


def made_of_reward_model(given: dict[str, Any]) -> Any:
    """Which trunk, what training shows, and what the trained model predicts."""
    config = rl_cluster.RewardModelConfig(**{"model_name": "a", **given})
    model = rl_cluster.RewardModel(config)
    _, tokenizer = tiny_model()
    trainer = rl_cluster.RewardModelTrainer(model, tokenizer, config, device="cpu")
    history = trainer.train_on_preferences(["1=1", "2=2", "33"], ["1=3", "2=4", "4"], 3, batch_size=1)
    source = model.base_model.config.name_or_path if not config.use_lora else ""
    return source, history, model.predict_rewards(["1="], tokenizer)


def test_every_field_of_the_reward_model_has_a_value() -> None:
    assert field_names(rl_cluster.RewardModelConfig) == set(REWARD_MODEL)


@pytest.mark.parametrize("name", REWARD_MODEL)
def test_a_field_of_the_reward_model_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    save_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    beside = {"use_lora": True} if name.startswith("lora_") else {}
    assert made_of_reward_model(beside | {name: REWARD_MODEL[name]}) != made_of_reward_model(beside)


def test_the_page_of_the_docs_is_the_list() -> None:
    page = Path(__file__).parents[2] / "docs" / "without_effect.md"
    assert page.read_text() == without_effect.page()
    for names in without_effect.WITHOUT_EFFECT.values():
        assert all(f"| `{name}` | {reason} |" in page.read_text() for name, reason in names.items())


def test_the_list_names_only_what_is_there() -> None:
    fields = {
        "RLOOConfig and GRPOConfig, from TrainingArguments": field_names(TrainingArguments),
        "RLOOConfig": field_names(rl_cluster.RLOOConfig),
        "GRPOConfig": field_names(rl_cluster.GRPOConfig),
        "PPOConfig": field_names(rl_cluster.PPOConfig),
        "DPOConfig, ORPOConfig, KTOConfig, SFTConfig, RewardConfig": field_names(rl_cluster.SFTConfig),
        "RewardModelConfig": field_names(rl_cluster.RewardModelConfig),
    }
    for front, names in fields.items():
        assert set(without_effect.WITHOUT_EFFECT[front]) <= names, front
