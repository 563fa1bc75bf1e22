"""RLOOTrainer in this process, from objects to trained objects, as in TRL's documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Qwen2ForSequenceClassification,
)

from rl_cluster.errors import BadInputError
from rl_cluster.reward_models import RewardModel, RewardModelConfig
from rl_cluster.trainers.rloo.config import RLOOConfig
from rl_cluster.trainers.rloo.trainer import RLOOTrainer
from tests.trainers.tiny import tiny_model

ROWS = [{"prompt": f"{a}{b}="} for a in range(4) for b in range(4)]
PAGE_METRICS = [
    "eps",
    "objective/kl",
    "objective/entropy",
    "objective/non_score_reward",
    "objective/rlhf_reward",
    "objective/scores",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "loss/policy_avg",
    "policy/entropy_avg",
    "val/ratio",
    "val/ratio_var",
    "val/num_eos_tokens",
    "lr",
    "episode",
]


def arguments(tmp_path: Path, **options: Any) -> RLOOConfig:
    values = {
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 16,
        "rloo_k": 4,
        "response_length": 2,
        "total_episodes": 48,
        "num_ppo_epochs": 2,
        "num_mini_batches": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "backend": "local",
        "progress": "none",
        "settings": {"cluster.cpus_per_worker": 1},
        "save_strategy": "no",
        **options,
    }
    return RLOOConfig(**values)


def last_digit(texts: list[str]) -> list[float]:
    return [float(text[3:4] == text[1]) for text in texts]


def sequence_classifier(policy: Any, num_labels: int = 1) -> Any:
    config = policy.config.to_dict() | {"num_labels": num_labels}
    torch.manual_seed(0)
    return Qwen2ForSequenceClassification(type(policy.config)(**config))


def test_the_pages_metrics_tables_card_and_the_trained_weights(tmp_path: Path) -> None:
    policy, tokenizer = tiny_model()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    texts: list[str] = []

    def reward(batch: list[str]) -> list[float]:
        texts.extend(batch)
        return last_digit(batch)

    trainer = RLOOTrainer(
        config=arguments(tmp_path, num_sample_generations=3, eval_strategy="steps", eval_steps=2),
        processing_class=tokenizer,
        policy=policy,
        ref_policy=policy,
        reward_model=reward,
        train_dataset=ROWS,
        eval_dataset=ROWS[:3],
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    output = trainer.train()
    assert output.global_step == 3
    rows = [row for row in trainer.state.log_history if "episode" in row]
    assert [row["episode"] for row in rows] == [16, 32, 48]
    for row in rows:
        assert set(PAGE_METRICS) <= set(row)
        assert row["objective/rlhf_reward"] == pytest.approx(
            row["objective/scores"] + row["objective/non_score_reward"]
        )
    assert rows[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert rows[0]["lr"] > rows[-1]["lr"]
    assert all(text[2] == "=" and "<" not in text for text in texts), (
        "prompt and completion, no special tokens"
    )
    assert [row["step"] for row in trainer.state.log_history if "eval_reward" in row] == [0, 2, 3]
    assert not any(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert trainer.policy is policy
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in samples} == {1, 2, 3}
    trainer.create_model_card("my-model", "my/data", ["tldr"])
    card = (tmp_path / "run" / "README.md").read_text()
    assert "# my-model" in card
    assert "tldr" in card
    trainer.save_model()
    torch.testing.assert_close(
        AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()["lm_head.weight"],
        policy.state_dict()["lm_head.weight"],
    )
    with pytest.raises(BadInputError, match=r"train\(\) has run"):
        trainer.train()
    trainer.close()
    with pytest.raises(BadInputError, match="the trainer is closed"):
        trainer.evaluate()


def test_another_reference_a_classifier_as_reward_and_a_callback_that_stops(tmp_path: Path) -> None:
    policy, tokenizer = tiny_model(0)
    other, _ = tiny_model(1)
    config = arguments(
        tmp_path,
        total_episodes=160,
        normalize_reward=True,
        normalize_advantage=True,
        token_level_kl=True,
        whiten_rewards=True,
        missing_eos_penalty=1.0,
        eval_strategy="steps",
        eval_steps=1,
        learning_rate=1e-6,
        metric_for_best_model="reward",
    )
    trainer = RLOOTrainer(
        config,
        tokenizer,
        policy,
        other,
        sequence_classifier(policy),
        [{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in ROWS],
        eval_dataset=ROWS[:2],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    trainer.close()
    assert trainer.state.global_step < 10
    first = next(row for row in trainer.state.log_history if "episode" in row)
    assert abs(first["objective/kl"]) > 1e-3, "the reference is the other model"
    assert first["shaping/missing_eos"] < 0


def test_a_reward_model_of_ours_scores_in_this_process(tmp_path: Path) -> None:
    policy, tokenizer = tiny_model()
    base, _ = tiny_model(3)
    reward = RewardModel(RewardModelConfig(model_name="none"), base_model=base)
    with RLOOTrainer(
        arguments(tmp_path, total_episodes=16), tokenizer, policy, None, reward, ROWS
    ) as trainer:
        trainer.train()
        assert trainer.state.log_history[-1]["objective/scores_std"] > 0


def test_bad_arguments_are_refused_before_anything_starts(tmp_path: Path) -> None:
    policy, tokenizer = tiny_model()
    good = {
        "processing_class": tokenizer,
        "policy": policy,
        "ref_policy": policy,
        "reward_model": last_digit,
        "train_dataset": ROWS,
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"policy": tokenizer}, "policy is Qwen2Tokenizer"),
        ({"processing_class": policy}, "processing_class is Qwen2ForCausalLM"),
        ({"ref_policy": 3}, "ref_policy is int 3"),
        ({"reward_model": 3}, "reward_model=3"),
        ({"reward_model": torch.nn.Linear(2, 2)}, "reward_model is a Linear"),
        ({"reward_model": sequence_classifier(policy, 2)}, "num_labels=2"),
        ({"train_dataset": [{"query": "1"}]}, "neither a column 'prompt'"),
        ({"train_dataset": [{"prompt": "1" * 40}]}, "40 tokens, more than the 30"),
        ({"data_collator": lambda rows: rows}, "data_collator=function"),
        ({"optimizers": (1, 2)}, "optimizers: the optimizer lives"),
        ({"config": arguments(tmp_path, rloo_k=3)}, "rloo_k=3: does not divide"),
        ({"config": arguments(tmp_path, response_length=40)}, "response_length=40: the model has 32"),
        ({"config": 3}, "give an RLOOConfig, not int"),
    ]
    for change, message in cases:
        with pytest.raises(BadInputError, match=message):
            RLOOTrainer(**{"config": arguments(tmp_path), **good, **change})
    assert not (tmp_path / "run").exists()


def test_a_used_folder_is_refused_or_overwritten_on_demand(tmp_path: Path) -> None:
    policy, tokenizer = tiny_model()
    config = arguments(tmp_path, total_episodes=16, overwrite_output_dir=True)
    for _ in range(2):
        with RLOOTrainer(config, tokenizer, policy, None, last_digit, ROWS) as trainer:
            assert trainer.train().global_step == 1
            trainer.save_model()
        with pytest.raises(BadInputError, match="is not empty"):
            RLOOTrainer(arguments(tmp_path), tokenizer, policy, None, last_digit, ROWS).train()
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing of the first run is left beside it"


def test_overwriting_deletes_nothing_that_no_run_wrote_and_only_once_the_new_run_has_begun(
    tmp_path: Path,
) -> None:
    policy, tokenizer = tiny_model()
    config = arguments(tmp_path, total_episodes=16, overwrite_output_dir=True)
    with RLOOTrainer(config, tokenizer, policy, None, last_digit, ROWS) as trainer:
        trainer.train()
    run = tmp_path / "run"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    bad = arguments(
        tmp_path, total_episodes=16, overwrite_output_dir=True, settings={"log.wandb_project": "a/b"}
    )
    with pytest.raises(BadInputError):
        RLOOTrainer(bad, tokenizer, policy, None, last_digit, ROWS).train()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before
    (run / "start" / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInputError, match=r"holds start/thesis\.tex, which no run wrote"):
        RLOOTrainer(config, tokenizer, policy, None, last_digit, ROWS).train()
    assert (run / "start" / "thesis.tex").read_text() == "years of work"


def test_a_recipe_called_config_does_not_make_a_folder_a_run(tmp_path: Path) -> None:
    policy, tokenizer = tiny_model()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    (tmp_path / "photos" / "config.yaml").write_text("an earlier run")
    config = arguments(tmp_path, output_dir=str(tmp_path / "photos"), overwrite_output_dir=True)
    with pytest.raises(BadInputError, match="not an earlier run"):
        RLOOTrainer(config, tokenizer, policy, None, last_digit, ROWS).train()
    assert (tmp_path / "photos" / "cat.jpg").exists()


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    tokenizer = tiny_model()[1]
    evaluations = iter([0.0, 10.0, 5.0])

    def reward(texts: list[str]) -> list[float]:
        # Groups of the next step may be scored in one call with an evaluation's.
        return [next(evaluations) if text.startswith("9") else last_digit([text])[0] for text in texts]

    def trained(name: str, episodes: int, **options: Any) -> Any:
        policy = tiny_model()[0]
        config = arguments(
            tmp_path,
            output_dir=str(tmp_path / name),
            total_episodes=episodes,
            lr_scheduler_type="constant",
            **options,
        )
        with RLOOTrainer(
            config, tokenizer, policy, None, reward, ROWS, eval_dataset=[{"prompt": "9="}]
        ) as it:
            it.train()
            return policy.state_dict(), it.state

    one_step, _ = trained("one", 16)
    best, state = trained(
        "best",
        32,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="reward",
    )
    assert (state.best_metric, state.best_global_step) == (10.0, 1)
    for name, value in best.items():
        torch.testing.assert_close(value, one_step[name], msg=name)
