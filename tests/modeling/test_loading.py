"""A checkpoint whose weights are not those of its config is refused wherever a model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    Qwen2ForSequenceClassification,
)

from rl_cluster import PPOConfig
from rl_cluster.environments.playing.from_config import _load_classifier
from rl_cluster.errors import BadInputError
from rl_cluster.files.atomic import replace_folder
from rl_cluster.modeling.load import load_critic, load_policy
from rl_cluster.modeling.score_model import load_score_model
from rl_cluster.modeling.scratch import build_model, build_tokenizer, save_scratch_model
from rl_cluster.reward_models.base import make_trunk
from rl_cluster.reward_models.config import RewardModelConfig
from rl_cluster.rewards.reward_model import load_reward_model
from rl_cluster.trainers.ppo.weights import UserModel
from tests.common.settings import TINY
from tests.modeling.architectures import Case, save_tiny

LOADERS: dict[str, Callable[[str], Any]] = {
    "policy": load_policy,
    "critic": load_critic,
    "score model": load_score_model,
    "trainer": lambda path: UserModel(path).module,
    "reward model": lambda path: make_trunk(RewardModelConfig(path, use_lora=False), None),
}
CLASSIFIERS: dict[str, Callable[[str], Any]] = {
    "scorer": lambda path: load_reward_model(path, build_tokenizer(TINY.alphabet, 64)),
    "preference model": _load_classifier,
    "score model": load_score_model,
}
MLP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_scratch_model(TINY, tmp_path / "lm", seed=3)
    return tmp_path / "lm"


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    tokenizer = build_tokenizer(TINY.alphabet, TINY.max_positions)
    config = build_model(TINY, len(tokenizer), 0).config
    config.num_labels = 1
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(load: Callable[[str], Any], folder: Path, *words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        load(str(folder))
    for word in (str(folder), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("who", LOADERS)
def test_a_whole_checkpoint_is_loaded(who: str, folder: Path) -> None:
    LOADERS[who](str(folder))


@pytest.mark.parametrize("who", LOADERS)
def test_a_missing_tensor_is_named(who: str, folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(MLP))
    refused(LOADERS[who], folder, "layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("who", LOADERS)
def test_layers_that_the_config_does_not_have_are_named(who: str, folder: Path) -> None:
    change_config(folder, num_hidden_layers=1, layer_types=["full_attention"], max_window_layers=1)
    refused(LOADERS[who], folder, "layers.1.", "more weights")


@pytest.mark.parametrize("who", LOADERS)
def test_a_tensor_of_another_shape_is_an_error(who: str, folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({MLP: weights[MLP][:-1].contiguous()}))
    refused(LOADERS[who], folder)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("who", LOADERS)
def test_a_weight_that_is_not_finite_is_named(who: str, number: float, folder: Path) -> None:
    change_weights(folder, lambda weights: weights[MLP].view(-1)[5:6].fill_(number))
    refused(LOADERS[who], folder, "not finite", "layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("who", LOADERS)
def test_another_architectures_config_over_the_weights_is_an_error(who: str, folder: Path) -> None:
    vocabulary = len(build_tokenizer(TINY.alphabet, TINY.max_positions))
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(folder)
    refused(LOADERS[who], folder)


@pytest.mark.parametrize("who", ["policy", "critic"])
def test_an_encoder_with_all_its_weights_is_not_causal(who: str, tmp_path: Path) -> None:
    from transformers import BertLMHeadModel

    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    config.architectures = ["BertLMHeadModel"]
    BertLMHeadModel(config).save_pretrained(tmp_path)
    refused(LOADERS[who], tmp_path)


def test_a_reward_models_base_may_be_an_encoder_with_heads_and_without_pooler(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertForMaskedLM(config).save_pretrained(tmp_path)
    make_trunk(RewardModelConfig(str(tmp_path), use_lora=False), None)


def test_a_head_that_is_not_tied_must_be_there(folder: Path, tmp_path: Path) -> None:
    tied = load_policy(str(folder)).lm.config.tie_word_embeddings
    assert "lm_head.weight" not in load_file(folder / "model.safetensors") or not tied
    change_config(folder, tie_word_embeddings=False)
    change_weights(folder, lambda weights: weights.pop("lm_head.weight", None))
    refused(load_policy, folder, "lacks lm_head.weight")
    load_critic(str(folder))


@pytest.mark.parametrize("who", CLASSIFIERS)
def test_a_classifier_lacks_nothing_and_is_finite(who: str, classifier: Path) -> None:
    load = CLASSIFIERS[who]
    load(str(classifier))
    change_weights(classifier, lambda weights: weights["score.weight"].fill_(float("nan")))
    refused(load, classifier, "not finite", "score.weight")
    change_weights(classifier, lambda weights: weights.pop("score.weight"))
    refused(load, classifier, "score.weight")


def test_a_classifiers_config_over_another_models_weights_is_an_error(classifier: Path) -> None:
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    config.architectures = [BertForSequenceClassification.__name__]
    config.save_pretrained(classifier)
    for load in (CLASSIFIERS["scorer"], CLASSIFIERS["preference model"]):
        refused(load, classifier)


def test_buffers_of_old_checkpoints_are_no_surprise(folder: Path) -> None:
    change_weights(
        folder,
        lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    load_policy(str(folder))


def test_a_value_head_of_another_model_is_an_error(folder: Path) -> None:
    load = lambda path: load_policy(path, value_head=True)  # noqa: E731
    head = load(str(folder)).value_head
    assert head is not None
    weights = dict(head.state_dict())
    save_file({k: v[:3].contiguous() for k, v in weights.items()}, folder / "value_head.safetensors")
    refused(load, folder, "value_head.safetensors", "size mismatch")
    weights["scalar.bias"] = torch.tensor([float("nan")])
    save_file(weights, folder / "value_head.safetensors")
    refused(load, folder, "not finite", "scalar.bias")


def test_a_trainer_given_such_a_name_stops_before_it_trains(folder: Path, tmp_path: Path) -> None:
    from rl_cluster import PPOTrainer

    change_weights(folder, lambda weights: weights.pop(MLP))
    config = PPOConfig(num_iterations=1, max_new_tokens=2, output_dir=str(tmp_path / "run"))
    tokenizer = build_tokenizer(TINY.alphabet, TINY.max_positions)
    with pytest.raises(BadInputError, match=re.escape("layers.1.mlp.up_proj.weight")):
        PPOTrainer(
            config,
            model=str(folder),
            tokenizer=tokenizer,
            reward_fn=lambda texts: [1.0] * len(texts),
        ).train(["1+1="] * 16)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_flipped_bit_in_weights_that_we_have_written_is_named(tmp_path: Path, loader: str) -> None:
    """A number that stays finite: nothing but the sum tells."""
    with replace_folder(tmp_path / "model", "model") as fresh:
        save_scratch_model(TINY, fresh, seed=3)
    file = tmp_path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadInputError, match=r"model\.safetensors has changed since it was written"):
        LOADERS[loader](str(file.parent))
    (file.parent / ".rl_cluster.json").unlink()  # as the message says, for weights that were replaced
    LOADERS[loader](str(file.parent))


def test_an_adapter_beside_the_model_and_a_config_against_itself_are_named(tmp_path: Path) -> None:
    save_tiny(Case("qwen2"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(BadInputError, match=r"model\.path.*cannot be loaded: .*alidat"):
        load_policy(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    get_peft_model(lm, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match="holds an adapter"):
        load_policy(str(tmp_path))
