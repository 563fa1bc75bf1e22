"""Reward models and environments as the documents call them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rl_cluster import (
    MultiObjectiveRewardEnv,
    MultiObjectiveRewardModel,
    Observation,
    PairwiseRewardModel,
    PreferenceComparisonEnv,
    RewardModel,
    RewardModelConfig,
    RewardModelTrainer,
    RLEnvironment,
    StepResult,
    TextGenerationEnv,
    create_code_generation_env,
    create_env_aware_reward_fn,
    create_math_problem_env,
    create_rl_environment,
)
from rl_cluster.modeling.scratch import build_tokenizer
from tests.reward_models.reward_cases import TOKENIZER, make_base

IDS = torch.tensor([[3, 4, 5], [6, 7, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
OTHER_IDS = torch.tensor([[8, 9, 3], [4, 4, 4]])
OTHER_MASK = torch.ones_like(OTHER_IDS)
PLAIN = RewardModelConfig(dropout_prob=0.0)


@pytest.mark.parametrize("architecture", ["bert", "qwen2"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_reward_model_gives_rewards_and_states(architecture: str, pooling: Any) -> None:
    config = RewardModelConfig(dropout_prob=0.0, pooling_strategy=pooling)
    model = RewardModel(config, base_model=make_base(architecture))
    assert isinstance(model.reward_head, nn.Sequential)
    output = model(IDS, MASK, return_dict=True)
    assert output["rewards"].shape == (2, 1)
    assert output["pooled_output"].shape == (2, 16)
    assert output["last_hidden_state"].shape == (2, 3, 16)
    torch.testing.assert_close(model(IDS, MASK.float())["rewards"], output["rewards"])


def test_a_temperature_divides_the_rewards() -> None:
    base = make_base("qwen2")
    usual = RewardModel(PLAIN, base_model=base)(IDS, MASK)["rewards"]
    warm = RewardModel(RewardModelConfig(dropout_prob=0.0, temperature=2.0), base_model=base)(IDS, MASK)
    torch.testing.assert_close(warm["rewards"], usual / 2)


def test_the_preference_loss_is_that_of_bradley_and_terry_with_a_margin() -> None:
    model = RewardModel(PLAIN, base_model=make_base("bert"))
    gap = model(IDS, MASK)["rewards"] - model(OTHER_IDS, OTHER_MASK)["rewards"]
    for margin in (0.0, 0.5):
        loss = model.compute_preference_loss(IDS, MASK, OTHER_IDS, OTHER_MASK, margin=margin)
        torch.testing.assert_close(loss, -torch.nn.functional.logsigmoid(gap - margin).mean())


def test_predicted_rewards_are_a_list_per_text() -> None:
    model = RewardModel(PLAIN, base_model=make_base("qwen2"))
    rewards = model.predict_rewards(["good", "bad text", "a"], TOKENIZER, max_length=16, batch_size=2)
    assert [len(row) for row in rewards] == [1, 1, 1]
    assert all(isinstance(row[0], float) for row in rewards)


def test_a_pairwise_model_compares_both_ways() -> None:
    model = PairwiseRewardModel(PLAIN, base_model=make_base("bert"))
    assert isinstance(model.comparison_head, nn.Sequential)
    score = model.forward_pair(IDS, MASK, OTHER_IDS, OTHER_MASK)
    assert score.shape == (2, 1)
    torch.testing.assert_close(model.forward_pair(OTHER_IDS, OTHER_MASK, IDS, MASK), -score)
    labels = torch.tensor([1.0, 0.0])
    loss = model.compute_bradley_terry_loss(IDS, MASK, OTHER_IDS, OTHER_MASK, labels)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(score[:, 0], labels)
    torch.testing.assert_close(loss, expected)


WEIGHTS = [0.5, 0.3, 0.2]


def several(**arguments: Any) -> MultiObjectiveRewardModel:
    return MultiObjectiveRewardModel(
        config=PLAIN, num_objectives=3, base_model=make_base("bert"), **arguments
    )


def test_the_weights_of_the_objectives_are_as_they_were_given() -> None:
    model = several(objective_weights=WEIGHTS)
    assert model.objective_weights == WEIGHTS
    assert model.objective_weights == tuple(WEIGHTS)
    assert list(model.objective_weights) == WEIGHTS
    assert model.objective_weights != [0.5, 0.5, 0.0]
    assert len(model.objective_weights) == 3
    assert sum(model.objective_weights) == pytest.approx(1.0)
    assert torch.allclose(torch.tensor(model.objective_weights), torch.tensor(WEIGHTS))
    # And as a tensor's, which they also were.
    assert model.objective_weights.tolist() == WEIGHTS
    assert torch.allclose(model.objective_weights, torch.tensor(WEIGHTS))
    torch.testing.assert_close(torch.ones(3) * model.objective_weights, torch.tensor(WEIGHTS))
    assert several().objective_weights == [1 / 3] * 3


def test_the_weights_are_used_as_a_tensor() -> None:
    weights, tensor = several(objective_weights=WEIGHTS).objective_weights, torch.tensor(WEIGHTS)
    assert weights.shape == (3,)
    assert weights.dtype == torch.float32
    assert weights.sum().item() == pytest.approx(1.0)
    assert (weights > 0).all()
    assert weights[0] == 0.5
    for found, expected in [
        (weights.to("cpu"), tensor),
        (weights * 2.0, tensor * 2),
        (2 * weights, tensor * 2),
        (weights / 2 + 1, tensor / 2 + 1),
        (1 - weights, 1 - tensor),
        (tensor - weights, tensor * 0),
        (-weights, -tensor),
        (torch.ones(2, 3) @ weights, torch.ones(2)),
        (torch.stack([tensor, weights]), torch.stack([tensor, tensor])),
        (torch.cat([weights, weights]), torch.cat([tensor, tensor])),
        (torch.as_tensor(weights), tensor),
        (weights.unsqueeze(0), tensor[None]),
        (torch.from_numpy(np.array(weights, dtype=np.float32)), tensor),
    ]:
        torch.testing.assert_close(found, expected)
    assert pickle.loads(pickle.dumps(weights)) == WEIGHTS
    assert json.loads(json.dumps(weights)) == WEIGHTS


def test_weights_of_a_loaded_state_are_those_that_act() -> None:
    model, other = several(objective_weights=WEIGHTS), several(objective_weights=[1.0, 0.0, -1.0])
    assert "objective_weights" in model.state_dict()
    model.load_state_dict(other.state_dict())
    assert model.objective_weights == [1.0, 0.0, -1.0]
    assert model.double().objective_weights == [1.0, 0.0, -1.0]
    assert several(objective_weights=WEIGHTS).double().objective_weights == WEIGHTS


def test_objectives_are_given_and_combined() -> None:
    model = several(objective_weights=WEIGHTS)
    output = model(IDS, MASK, return_all_objectives=True)
    assert output["rewards"].shape == (2, 3)
    assert output["combined_reward"].shape == (2, 1)
    combined = model.combine_objectives(output["rewards"])
    torch.testing.assert_close(combined, output["combined_reward"])
    torch.testing.assert_close(combined[:, 0], output["rewards"] @ torch.tensor(WEIGHTS))
    torch.testing.assert_close(model.combine_objectives(output["rewards"][0]), combined[0])
    with pytest.raises(ValueError, match="a reward per objective"):
        model.combine_objectives(torch.zeros(2, 2))


def test_the_loss_of_objectives_comes_with_a_dict_of_their_losses() -> None:
    model = several(objective_weights=WEIGHTS)
    targets = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]])
    loss, losses = model.compute_multi_objective_loss(IDS, MASK, targets)
    squares = (model(IDS, MASK)["rewards"] - targets).square()
    torch.testing.assert_close(loss, squares.mean())
    assert isinstance(losses, dict)
    assert list(losses) == ["objective_0", "objective_1", "objective_2"]
    assert all("objective_" in name for name in losses)
    for number in range(3):
        torch.testing.assert_close(losses[f"objective_{number}"], squares[:, number].mean())
        torch.testing.assert_close(losses[number], squares[:, number].mean())
    torch.testing.assert_close(torch.stack(list(losses.values())), losses.tensor)
    assert losses.tolist() == losses.tensor.tolist()
    torch.testing.assert_close(torch.mean(losses), loss)
    kept, _ = model.compute_multi_objective_loss(IDS, MASK, targets, objective_mask=torch.tensor([1, 0, 0]))
    torch.testing.assert_close(kept, squares[:, 0].mean())


def test_the_trainer_trains_saves_and_loads(tmp_path: Path) -> None:
    config = RewardModelConfig(dropout_prob=0.0, learning_rate=1e-2, warmup_steps=0)
    model = RewardModel(config, base_model=make_base("qwen2"))
    trainer = RewardModelTrainer(model=model, tokenizer=TOKENIZER, config=config, device=None)
    assert (trainer.model, trainer.tokenizer, trainer.config) == (model, TOKENIZER, config)
    assert isinstance(trainer.optimizer, torch.optim.Optimizer)
    texts = {"chosen_texts": ["good one", "good two"], "rejected_texts": ["bad", "worse"]}
    history = trainer.train_on_preferences(**texts, num_epochs=5, batch_size=2)
    assert history["loss"][-1] < history["loss"][0]
    assert model.training
    trainer.save_model(tmp_path / "reward_model.pt")
    before = model.predict_rewards(["good"], TOKENIZER)
    trainer.train_on_preferences(**texts, num_epochs=1, batch_size=2)
    trainer.load_model(tmp_path / "reward_model.pt")
    assert model.predict_rewards(["good"], TOKENIZER) == before


LETTERS = build_tokenizer("abcdefghijklmnopqrstuvwxyz .!?0123456789+=", 64)


def ids(text: str) -> list[int]:
    return list(LETTERS(text, add_special_tokens=False)["input_ids"])


def test_an_environment_starts_with_the_documented_attributes() -> None:
    env = TextGenerationEnv(tokenizer=LETTERS, prompts=["write a story", "explain"], max_length=16)
    assert isinstance(env, RLEnvironment)
    assert (env.prompts, env.max_length, env.current_prompt_idx) == (["write a story", "explain"], 16, 0)
    seen = env.reset()
    assert isinstance(seen, Observation)
    assert (seen.prompt, env.current_text, env.steps) == ("write a story", "write a story", 0)
    assert seen.input_ids.shape == seen.attention_mask.shape == (1, len(ids("write a story")))
    assert isinstance(env.render(), str)


@pytest.mark.parametrize("make", [lambda i: i[0], lambda i: torch.tensor(i[0]), torch.tensor])
def test_a_step_takes_one_token_or_many(make: Any) -> None:
    env = TextGenerationEnv(LETTERS, ["a"], max_length=16)
    env.reset()
    result = env.step(make(ids("bc")))
    assert isinstance(result, StepResult)
    assert (type(result.reward), type(result.done)) == (float, bool)
    assert not result.done
    assert result.next_observation is not None
    assert set(result.info) >= {"generated_text", "steps"}
    assert set(result.metrics) >= {"reward", "length"}


def test_an_episode_ends_at_its_length_and_pays_words_by_default() -> None:
    env = TextGenerationEnv(LETTERS, ["a"], max_length=5)
    env.reset()
    result = env.step(torch.tensor(ids("b c d")))
    assert result.done
    assert result.reward == pytest.approx(3 / 100)


def test_a_reward_function_gets_prompt_generated_and_full_text() -> None:
    seen: list[tuple[str, str, str]] = []

    def reward(prompt: str, generated: str, full_text: str) -> float:
        seen.append((prompt, generated, full_text))
        return 2.0

    env = TextGenerationEnv(LETTERS, ["a "], max_length=9, reward_fn=reward, stop_sequences=["!"])
    env.reset()
    result = env.step(torch.tensor(ids("b!")))
    assert (result.done, result.reward) == (True, 2.0)
    assert seen == [("a ", "b!", "a b!")]


def test_a_stop_sequence_in_the_prompt_does_not_end_the_episode() -> None:
    env = TextGenerationEnv(LETTERS, ["stop! "], max_length=9, stop_sequences=["!"])
    env.reset()
    assert not env.step(ids("a")[0]).done


def test_objectives_of_an_environment_are_in_its_metrics() -> None:
    env = MultiObjectiveRewardEnv(
        tokenizer=LETTERS,
        prompts=["a"],
        reward_components={
            "correctness": lambda prompt, generated, full_text: 1.0,
            "formatting": lambda prompt, generated, full_text: 0.5,
        },
        reward_weights={"correctness": 1.0, "formatting": 0.1},
        max_length=1,
    )
    env.reset()
    result = env.step(ids("b")[0])
    assert result.metrics["reward_correctness"] == 1.0
    assert result.metrics["reward_formatting"] == 0.5
    assert result.reward == result.metrics["reward_total"] == pytest.approx(1.05)


def test_two_responses_are_compared() -> None:
    env = PreferenceComparisonEnv(
        tokenizer=LETTERS,
        prompts=["a"],
        human_feedback_fn=lambda prompt, first, second: 1.0 if len(first) > len(second) else -1.0,
        max_length=8,
    )
    assert env.reset().metadata["comparison_round"] == 0
    first = env.step(torch.tensor(ids("long")))
    assert not first.done
    assert first.next_observation is not None
    assert first.next_observation.metadata["comparison_round"] == 1
    second = env.step(torch.tensor(ids("s")))
    assert second.done
    assert second.reward > 0


@pytest.mark.parametrize("make", [create_math_problem_env, create_code_generation_env])
def test_built_in_environments_have_levels_and_components(make: Any, char_tokenizer: Any) -> None:
    env = make(char_tokenizer)
    assert env.prompts
    assert isinstance(env.reset(), Observation)
    for level in ("easy", "medium", "hard"):
        env.set_difficulty(level)
        assert env.prompts


def test_an_environment_is_made_from_settings_or_refused_by_name() -> None:
    assert create_rl_environment(SimpleNamespace(), LETTERS, ["a"]) is None
    env = create_rl_environment(SimpleNamespace(rl_env_type="text_generation"), LETTERS, ["a"])
    assert isinstance(env, TextGenerationEnv)
    for settings, message in (
        ({"rl_env_type": "maze"}, "Invalid rl_env_type"),
        ({"rl_env_type": "text_generation", "rl_env_config": "{"}, "Failed to parse rl_env_config"),
        ({"rl_env_type": "multi_objective", "rl_env_config": "{}"}, "reward_components"),
        ({"rl_env_type": "text_generation", "rl_max_new_tokens": 0}, "max_length"),
        ({"rl_env_type": "text_generation", "rl_temperature": 0}, "temperature"),
    ):
        with pytest.raises(ValueError, match=message):
            create_rl_environment(SimpleNamespace(**settings), LETTERS, ["a"])


def test_a_reward_function_knows_the_environment() -> None:
    env = TextGenerationEnv(LETTERS, ["a "], max_length=9)
    rewards = create_env_aware_reward_fn(env, None, LETTERS)([torch.tensor(ids("a b c"))])
    assert rewards == [pytest.approx(2 / 100)]
