"""Saving, loading, rebuilding and exporting give the same rewards, or an error that names the folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.reward_models import (
    MultiObjectiveRewardModel,
    PairwiseRewardModel,
    RewardModel,
    RewardModelConfig,
    RewardModelTrainer,
    export_classifier,
    load_saved_reward_model,
)
from rl_cluster.rewards.reward_model import load_reward_model
from tests.reward_models.reward_cases import TOKENIZER, TableBase, make_base

TEXTS = ["abc", "1+2=3", "a longer text"]


def make_trainer(kind=RewardModel, architecture="qwen2", seed=0, **fields):
    config = RewardModelConfig(**{"learning_rate": 1e-2, "warmup_steps": 0, "seed": seed, **fields})
    model = kind(config, base_model=make_base(architecture, seed))
    return RewardModelTrainer(model, TOKENIZER, config)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("kind", "architecture"),
    [(RewardModel, "qwen2"), (PairwiseRewardModel, "bert"), (MultiObjectiveRewardModel, "gpt2")],
)
def test_a_saved_model_comes_back_with_its_rewards(kind, architecture, lora, tmp_path):
    trainer = make_trainer(kind, architecture, use_lora=lora, temperature=0.7)
    trainer.train_on_preferences(["abc"], ["abd"], num_epochs=2)
    rewards = trainer.model.predict_rewards(TEXTS, TOKENIZER)
    trainer.save_model(tmp_path / "reward_model.pt")
    trainer.save_model(tmp_path / "reward_model.pt")  # in place of the first
    assert [path.name for path in tmp_path.iterdir()] == ["reward_model.pt"]
    other = make_trainer(kind, architecture, seed=1, use_lora=lora, temperature=0.7)
    assert other.model.predict_rewards(TEXTS, TOKENIZER) != rewards
    other.load_model(str(tmp_path / "reward_model.pt"))
    assert other.model.predict_rewards(TEXTS, TOKENIZER) == rewards
    rebuilt, tokenizer = load_saved_reward_model(tmp_path / "reward_model.pt")
    assert type(rebuilt) is kind and not rebuilt.training
    assert rebuilt.predict_rewards(TEXTS, tokenizer) == rewards


def test_the_weights_of_the_combination_come_back(tmp_path):
    config = RewardModelConfig()
    model = MultiObjectiveRewardModel(config, 2, [2.0, -1.0], make_base("qwen2"))
    RewardModelTrainer(model, TOKENIZER, config).save_model(tmp_path / "m")
    rebuilt, tokenizer = load_saved_reward_model(tmp_path / "m")
    assert rebuilt.as_reward_fn(tokenizer)(["ab"], ["c"]) == model.as_reward_fn(TOKENIZER)(["ab"], ["c"])
    assert rebuilt.objective_weights.tolist() == [2.0, -1.0]


def test_loading_starts_the_optimizer_afresh(tmp_path):
    trainer = make_trainer(warmup_steps=10)
    trainer.save_model(tmp_path / "m")
    trainer.train_on_preferences(["abc"], ["abd"], num_epochs=4)
    trainer.load_model(tmp_path / "m")
    assert not trainer.optimizer.state
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_a_folder_that_is_missing_or_of_another_model_is_refused_and_changes_nothing(tmp_path):
    trainer = make_trainer()
    rewards = trainer.model.predict_rewards(TEXTS, TOKENIZER)
    with pytest.raises(BadInputError, match=r"nowhere.*there is no such folder"):
        trainer.load_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match=r"empty.*holds no reward_model.json"):
        trainer.load_model(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=r"file'.*is a file"):
        trainer.save_model(tmp_path / "file")
    others = {
        "temperature 2.0": make_trainer(temperature=2.0),
        "kind 'PairwiseRewardModel'": make_trainer(PairwiseRewardModel),
        "pooling_strategy 'mean'": make_trainer(pooling_strategy="mean"),
        "its weights are of another base": make_trainer(architecture="bert"),
    }
    for message, other in others.items():
        other.save_model(tmp_path / "other")
        with pytest.raises(BadInputError, match=message):
            trainer.load_model(tmp_path / "other")
    with pytest.raises(BadInputError, match="path=3"):
        trainer.load_model(3)
    assert trainer.model.predict_rewards(TEXTS, TOKENIZER) == rewards


def test_a_damaged_folder_is_a_checkpoint_error(tmp_path):
    trainer = make_trainer()
    trainer.save_model(tmp_path / "m")
    (tmp_path / "m" / "reward_model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer.load_model(tmp_path / "m")
    (tmp_path / "m" / "reward_model.json").write_text(json.dumps({"kind": "RewardModel"}))
    with pytest.raises(CheckpointError, match="is damaged"):
        trainer.load_model(tmp_path / "m")


def test_a_model_on_a_base_of_ones_own_is_loaded_but_not_rebuilt(tmp_path):
    config = RewardModelConfig()
    trainers = [RewardModelTrainer(RewardModel(config, TableBase()), TOKENIZER, config) for _ in range(2)]
    with torch.no_grad():
        trainers[0].model.base_model.table.add_(1.0)
    trainers[0].save_model(tmp_path / "m")
    trainers[1].load_model(tmp_path / "m")
    assert torch.equal(trainers[1].model.base_model.table, trainers[0].model.base_model.table)
    with pytest.raises(BadInputError, match="base of your own; build the model yourself"):
        load_saved_reward_model(tmp_path / "m")


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_an_exported_classifier_scores_in_a_run_as_the_model_does(architecture, lora, tmp_path):
    trainer = make_trainer(architecture=architecture, use_lora=lora, temperature=0.5)
    trainer.train_on_preferences(["abc", "ab"], ["abd", "x"], num_epochs=2)
    model = trainer.model
    export_classifier(model, TOKENIZER, tmp_path / "scorer")
    scorer = load_reward_model(str(tmp_path / "scorer"), TOKENIZER)
    sequences = [np.array(TOKENIZER(text)["input_ids"]) for text in TEXTS]
    wanted = np.array(model.predict_rewards(TEXTS, TOKENIZER))[:, 0]
    np.testing.assert_allclose(scorer.score(sequences), wanted, atol=1e-4)
    assert np.ptp(wanted) > 0.1
    assert model.training


def test_what_transformers_would_read_otherwise_is_not_exported(tmp_path):
    refused = {
        "pooling_strategy='mean'": make_trainer(pooling_strategy="mean"),
        "PairwiseRewardModel: only a plain": make_trainer(PairwiseRewardModel),
        "BertModel has no plain linear head": make_trainer(architecture="bert"),
    }
    for message, trainer in refused.items():
        with pytest.raises(BadInputError, match=message):
            export_classifier(trainer.model, TOKENIZER, tmp_path / "scorer")
    assert not (tmp_path / "scorer").exists()


@pytest.mark.parametrize("file", ["reward_model.safetensors", "reward_model.json"])
def test_a_changed_byte_of_a_saved_model_is_named(file, tmp_path):
    trainer = make_trainer()
    trainer.save_model(tmp_path / "m")
    path = tmp_path / "m" / file
    data = bytearray(path.read_bytes())
    place = data.index(b"0.") if file.endswith("json") else len(data) - 40
    data[place] ^= 1
    path.write_bytes(data)
    for load in (trainer.load_model, load_saved_reward_model):
        with pytest.raises(CheckpointError, match=f"{file} has changed since it was written"):
            load(tmp_path / "m")


def test_a_changed_byte_of_an_exported_classifier_is_named(tmp_path):
    trainer = make_trainer()
    export_classifier(trainer.model, TOKENIZER, tmp_path / "classifier")
    path = tmp_path / "classifier" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadInputError, match="has changed since it was written"):
        load_reward_model(str(tmp_path / "classifier"), TOKENIZER)
