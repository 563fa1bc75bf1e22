"""PPO and DPO as the documents call them: parts by hand, trainers for a step or two on a tiny model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_cluster import (
    AdaptiveKLController,
    DPOConfig,
    DPOTrainer,
    PPOBuffer,
    PPOConfig,
    PPOModel,
    PPOTrainer,
    PreferenceDataset,
    ValueHead,
)
from tests.trainers.tiny import tiny_model

QUIET: dict[str, Any] = {"backend": "local", "progress": "none"}


def longest(prompts: list[str], responses: list[str], metadata: Any = None) -> list[float]:
    return [len(response) / 10 for response in responses]


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PPOTrainer]:
    model, tokenizer = tiny_model()
    config = PPOConfig(
        batch_size=2,
        mini_batch_size=2,
        max_new_tokens=4,
        learning_rate=1e-3,
        save_every=0,
        output_dir=str(tmp_path_factory.mktemp("ppo") / "run"),
        settings={"cluster.cpus_per_worker": 1},
        **QUIET,
    )
    with PPOTrainer(config, model, tokenizer, reward_fn=longest) as trainer:
        yield trainer


def test_the_value_head_gives_one_number_per_state() -> None:
    head = ValueHead(8)
    first, last = (module for module in head.modules() if isinstance(module, nn.Linear))
    assert (first.in_features, last.out_features) == (8, 1)
    states = torch.randn(2, 5, 8)
    by_hand = last(torch.relu(first(states)))
    torch.testing.assert_close(head(states).reshape(2, 5), by_hand.reshape(2, 5))


def test_the_ppo_model_gives_logits_and_with_return_value_a_value_per_token() -> None:
    base, tokenizer = tiny_model()
    model = PPOModel(base)
    assert isinstance(model.value_head, ValueHead)
    ids = torch.tensor([[3, 4, 5], [5, 4, 3]])
    mask = torch.ones_like(ids)
    logits = model(ids, attention_mask=mask)
    both = model(ids, attention_mask=mask, return_value=True)
    assert logits.shape == (2, 3, len(tokenizer))
    torch.testing.assert_close(both[0], base(ids, attention_mask=mask).logits)
    assert both[1].shape == (2, 3)


@pytest.mark.parametrize(("current", "error"), [(12.0, 0.2), (6.3, 0.05), (0.0, -0.2)])
def test_the_kl_controller_follows_its_formula(current: float, error: float) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.2, target=6.0, horizon=100)
    controller.update(current, n_steps=10)
    assert controller.value == pytest.approx(0.2 * (1 + error * 10 / 100))


def test_the_buffer_gives_a_batch_for_train_step() -> None:
    buffer = PPOBuffer()
    buffer.add([torch.tensor([3])], [torch.tensor([4, 5])], [1.0])
    assert len(buffer) == 1
    batch = buffer.get()
    assert set(batch) >= {"queries", "responses", "rewards"}
    buffer.clear()
    assert len(buffer) == 0


def test_generate_responses_gives_texts_and_the_documented_tensors(ppo: PPOTrainer) -> None:
    texts, outputs = ppo.generate_responses(["1=", "23="], max_new_tokens=3)
    assert [type(text) for text in texts] == [str, str]
    assert set(outputs) == {"sequences", "response_ids", "prompt_ids"}
    assert outputs["sequences"].shape[0] == 2
    assert all(1 <= len(ids) <= 3 for ids in outputs["response_ids"])


def test_advantages_and_returns_are_those_of_gae(ppo: PPOTrainer) -> None:
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
    advantages, returns = ppo.compute_advantages(rewards, values, torch.tensor([0, 1]))
    last = 1.0 - 0.25
    first = 0.99 * 0.25 - 0.5 + 0.99 * 0.95 * last
    torch.testing.assert_close(advantages, torch.tensor([first, last]))
    torch.testing.assert_close(returns, advantages + values)


def test_the_kl_penalty_is_the_coefficient_times_the_log_ratio(ppo: PPOTrainer) -> None:
    policy, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    penalty = ppo.compute_kl_penalty(policy, reference)
    torch.testing.assert_close(penalty, ppo.kl_coef * (policy - reference))


def test_ppo_trains_and_returns_a_list_per_documented_metric(ppo: PPOTrainer) -> None:
    metrics = ppo.train(["1=", "2="], num_iterations=2)
    assert set(metrics) == {"policy_loss", "value_loss", "kl_divergence", "entropy", "rewards", "kl_coef"}
    for name, values in metrics.items():
        assert len(values) == 2, name
        assert all(math.isfinite(value) for value in values if value is not None), name
    assert metrics.model is ppo.model


def test_a_ppo_checkpoint_is_saved_and_loaded(ppo: PPOTrainer, tmp_path: Path) -> None:
    ppo.train(["1=", "2="], num_iterations=1)
    ppo.save_checkpoint(tmp_path / "there")
    saved = {name: value.clone() for name, value in ppo.model.state_dict().items()}
    ppo.train(["1=", "2="], num_iterations=1)
    assert not all(torch.equal(value, saved[name]) for name, value in ppo.model.state_dict().items())
    ppo.load_checkpoint(tmp_path / "there")
    for name, value in ppo.model.state_dict().items():
        torch.testing.assert_close(value, saved[name], msg=name)


def test_a_training_step_gives_a_number_per_metric(ppo: PPOTrainer) -> None:
    answer = ppo.train_step({"prompts": ["1=", "2="]})
    assert {"policy_loss", "value_loss", "rewards"} <= set(answer)


@pytest.fixture
def pairs() -> PreferenceDataset:
    return PreferenceDataset(
        prompts=["1=", "22="],
        chosen=["11", "2"],
        rejected=["3", "44"],
        tokenizer=tiny_model()[1],
        max_length=16,
        max_prompt_length=8,
    )


def test_an_item_of_the_preference_dataset_has_the_documented_columns(pairs: PreferenceDataset) -> None:
    assert len(pairs) == 2
    item = pairs[1]
    sides = ("prompt", "chosen", "rejected")
    assert set(item) == {f"{s}_{kind}" for s in sides for kind in ("input_ids", "attention_mask")} | {
        "prompt_length"
    }
    assert item["prompt_length"] == 3
    for side in sides:
        assert item[f"{side}_input_ids"].shape == item[f"{side}_attention_mask"].shape


def dpo_trainer(folder: Path, **changed: Any) -> tuple[DPOTrainer, Any]:
    model, tokenizer = tiny_model()
    given = {"batch_size": 2, "gradient_accumulation_steps": 1, "max_length": 16, "max_prompt_length": 8}
    config = DPOConfig(**given | QUIET | {"output_dir": str(folder), "cpus_per_worker": 1} | changed)
    return DPOTrainer(config, model, tokenizer), model


def test_dpo_starts_at_log_2_and_returns_a_list_per_documented_metric(
    pairs: PreferenceDataset, tmp_path: Path
) -> None:
    trainer, _ = dpo_trainer(tmp_path / "run", num_epochs=2, learning_rate=1e-2, warmup_ratio=0.0)
    metrics = trainer.train(pairs)
    assert set(metrics) == {"loss", "accuracy", "reward_margin", "chosen_rewards", "rejected_rewards"}
    assert metrics["loss"][0] == pytest.approx(math.log(2), abs=1e-4)
    assert metrics["loss"][1] < metrics["loss"][0]  # type: ignore[operator]


def test_dpo_evaluates_under_the_documented_names(pairs: PreferenceDataset, tmp_path: Path) -> None:
    trainer, _ = dpo_trainer(tmp_path / "run")
    answer = trainer.evaluate(pairs)
    assert set(answer) == {"eval_loss", "eval_accuracy", "eval_margin"}
    assert answer["eval_loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_train_on_preferences_gives_the_model(tmp_path: Path) -> None:
    trainer, model = dpo_trainer(tmp_path / "run")
    trained = trainer.train_on_preferences(["1=", "2="], ["1", "2"], ["3", "4"])
    assert trained is model


def test_dpo_without_reference_differs_from_log_2(pairs: PreferenceDataset, tmp_path: Path) -> None:
    trainer, _ = dpo_trainer(tmp_path / "run", reference_free=True)
    loss = trainer.evaluate(pairs)["eval_loss"]
    assert loss is not None
    assert abs(loss - math.log(2)) > 1e-3
