"""GRPOTrainer in this process: functions called as TRL calls them, weights back in the caller's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from rl_cluster.errors import BadInputError
from rl_cluster.trainers.grpo.config import GRPOConfig
from rl_cluster.trainers.grpo.trainer import GRPOTrainer, lora_section
from tests.trainers.tiny import tiny_model

ROWS = [{"prompt": f"{a}{b}=", "answer": str(b)} for a in range(4) for b in range(4)]


def arguments(tmp_path: Path, **options: Any) -> GRPOConfig:
    values = {
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 2,
        "max_steps": 2,
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
    return GRPOConfig(**values)


def test_two_rewards_are_called_with_columns_and_weighed_and_the_model_has_the_trained_weights(
    tmp_path: Path,
) -> None:
    model, tokenizer = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[dict[str, Any]] = []

    def answers(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        seen.append({"prompts": prompts, "answer": answer, "state": kwargs["trainer_state"]})
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    async def short(completions: list[str]) -> list[float]:
        return [float(len(c) <= 1) for c in completions]

    args = arguments(
        tmp_path, num_iterations=2, reward_weights=[1.0, 0.5], loss_type="sapo", log_completions=True
    )
    with GRPOTrainer(model, [answers, short], args, ROWS, processing_class=tokenizer) as trainer:
        output = trainer.train()
        assert output.global_step == 2, "one generation, two updates"
        logs = trainer.state.log_history[-1]
        assert logs["objective/scores"] == pytest.approx(
            logs["rewards/answers"] + 0.5 * logs["rewards/short"]
        )
        assert all(row["prompts"][0][1] == row["answer"][0] for row in seen)
        assert seen[0]["state"] is trainer.state
        trainer.save_model(str(tmp_path / "saved"))
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(before)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, saved[name])
    assert (tmp_path / "run" / "samples.jsonl").read_text().count("\n") > 0


def test_chats_arrive_as_messages_an_environment_scores_and_adapters_train(tmp_path: Path) -> None:
    model, tokenizer = tiny_model()
    scored: list[Any] = []

    class Cases:
        def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
            return [{"prompt": [{"role": "user", "content": f"{i}"}], "case_idx": i} for i in range(4)]

        def score_episode(self, model: Any, tokenizer: Any, completion: Any, case_idx: int) -> float:
            scored.append((completion, case_idx))
            return float(completion[0]["content"] == str(case_idx))

    args = arguments(tmp_path, max_steps=1, beta=0.1)
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
    trainer = GRPOTrainer(model, args=args, env=Cases(), processing_class=tokenizer, peft_config=lora)
    assert trainer.config.model.lora.targets == ("q_proj",)
    trainer.train()
    assert len(scored) == 16
    assert {case for _, case in scored} == {0, 1, 2, 3}
    assert scored[0][0][0]["role"] == "assistant"
    assert type(trainer.model).__name__.startswith("Peft")
    assert (
        trainer.evaluate([{"prompt": [{"role": "user", "content": "1"}], "case_idx": 1}])["eval_reward"] >= 0
    )
    trainer.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda completions: [1.0], r"returned 1 rewards for \d+ responses"),
        (lambda completions: [float("nan")] * len(completions), "returned nan for the completion"),
        (lambda completions: 1.0, r"returned float 1.0: a list of \d+ numbers"),
        (lambda completions: ["good"] * len(completions), "returned 'good' for the completion"),
    ],
)
def test_rewards_that_are_none_are_the_users_bad_input(tmp_path: Path, answer: Any, message: str) -> None:
    model, tokenizer = tiny_model()
    trainer = GRPOTrainer(model, answer, arguments(tmp_path), ROWS, processing_class=tokenizer)
    with pytest.raises(BadInputError, match=message):
        trainer.train()
    trainer.close()


def test_a_reward_of_none_is_in_no_sum_no_mean_and_no_baseline(tmp_path: Path) -> None:
    """The first of each four completions has no reward of either function, the second only of the second."""
    model, tokenizer = tiny_model()

    def first(completions: list[str], **_: Any) -> list[float | None]:
        return [(None, None, 1.0, 3.0)[i % 4] for i in range(len(completions))]

    def second(completions: list[str], **_: Any) -> list[float | None]:
        return [(None, 8.0, None, 4.0)[i % 4] for i in range(len(completions))]

    args = arguments(tmp_path, max_steps=1, reward_weights=[1.0, 0.5], beta=0.0)
    args.settings["log.trajectories"] = True
    with GRPOTrainer(model, [first, second], args, ROWS, processing_class=tokenizer) as trainer:
        with pytest.warns(UserWarning, match="All reward functions returned None for 1 of the 4 samples"):
            trainer.train()
        logs = [row for row in trainer.state.log_history if "objective/scores" in row][-1]
    assert logs["rewards/first"] == 2.0
    assert logs["rewards/second"] == 6.0
    assert logs["objective/scores"] == pytest.approx((4.0 + 1.0 + 5.0) / 3)
    assert logs["completions/without_reward_fraction"] == 0.25
    (rows,) = (tmp_path / "run" / "trajectories").glob("*.parquet")
    table = pyarrow.parquet.read_table(rows).to_pydict()
    assert table["score"][:4] == [None, 4.0, 1.0, 5.0]
    std = np.std([4.0, 1.0, 5.0], ddof=1) + 1e-4
    expected = [0.0, *((np.array([4.0, 1.0, 5.0]) - 10 / 3) / std)]
    drawn = [np.array(a)[np.array(m)] for a, m in zip(table["advantages"], table["action_mask"], strict=True)]
    for row, value in zip(drawn[:4], expected, strict=True):
        assert row == pytest.approx(np.full(len(row), value), rel=1e-5)


def fine(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def test_bad_arguments_are_refused_before_anything_starts(tmp_path: Path) -> None:
    model, tokenizer = tiny_model()
    good = {"model": model, "reward_funcs": fine, "train_dataset": ROWS, "processing_class": tokenizer}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": 3}, "model is int 3"),
        ({"model": torch.nn.Linear(1, 1)}, "model is Linear"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"reward_funcs": None}, "reward_funcs: give a function"),
        ({"reward_funcs": []}, "reward_funcs: give a function"),
        ({"reward_funcs": 3}, r"reward_funcs\[0\]=3"),
        ({"reward_funcs": lambda texts: texts}, "needs 'texts'"),
        ({"reward_funcs": lambda completions, completion_ids: 0}, "needs 'completion_ids'"),
        ({"reward_funcs": lambda prompts: prompts}, "does not take 'completions'"),
        ({"args": arguments(tmp_path, reward_weights=[1.0, 2.0])}, "2 weights for 1 rewards"),
        ({"args": {"beta": 1}}, "give a GRPOConfig, not dict"),
        (
            {"args": arguments(tmp_path, max_completion_length=32)},
            "max_completion_length=32: the model has 32",
        ),
        ({"args": arguments(tmp_path, max_prompt_length=2)}, "3 tokens, more than the 2"),
        ({"args": arguments(tmp_path, eval_strategy="steps")}, "needs an eval_dataset"),
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"train_dataset": None}, "train_dataset is NoneType"),
        ({"optimizers": (torch.optim.SGD(model.parameters(), 0.1), None)}, "optimizers: the optimizer lives"),
        ({"callbacks": [3]}, "not a transformers TrainerCallback"),
        ({"processing_class": 3}, "processing_class is int 3"),
        ({"peft_config": 3}, "peft_config is int"),
        ({"env": object()}, "object has no build_dataset"),
    ]
    for change, message in cases:
        with pytest.raises(BadInputError, match=message):
            GRPOTrainer(**{**good, "args": arguments(tmp_path), **change})
    assert not (tmp_path / "run").exists()


def test_a_lora_config_that_the_learner_cannot_do_is_refused() -> None:
    assert lora_section(LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1)) == {
        "rank": 4,
        "alpha": 8.0,
        "dropout": 0.1,
        "targets": "all-linear",
    }
    with pytest.raises(BadInputError, match=r"peft_config.use_rslora=True"):
        lora_section(LoraConfig(use_rslora=True))
    with pytest.raises(BadInputError, match=r"target_modules='q_\.\*'"):
        lora_section(LoraConfig(target_modules="q_.*"))


def test_rewards_that_teach_nothing_are_told_of_where_the_caller_sees_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def constant(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    model, tokenizer = tiny_model()
    args = arguments(tmp_path)
    with GRPOTrainer(model, constant, args, ROWS, processing_class=tokenizer) as trainer:
        trainer.train()
    assert "step 2" in caplog.text and "groups/without_signal" in caplog.text
    assert "groups/without_signal" in (tmp_path / "run" / "alarms.jsonl").read_text()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["groups/without_signal"] for row in rows if row["step"] > 0] == [4.0, 4.0]
