"""A reward model becomes a folder (safetensors, JSON, tokenizer), and such a folder a reward model again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.files.atomic import recover_folder, replace_folder
from rl_cluster.files.own_folders import folder_to_write
from rl_cluster.files.sealed_weights import changed_weights, spoilt_words
from rl_cluster.reward_models.base import UNUSED
from rl_cluster.reward_models.config import RewardModelConfig
from rl_cluster.reward_models.multi_objective import MultiObjectiveRewardModel
from rl_cluster.reward_models.pairwise import PairwiseRewardModel
from rl_cluster.reward_models.reward_model import RewardModel

DESCRIPTION, WEIGHTS = "reward_model.json", "reward_model.safetensors"
KIND = "reward model"
"""Of the folder, for its marker."""
KINDS = {kind.__name__: kind for kind in (RewardModel, PairwiseRewardModel, MultiObjectiveRewardModel)}
MEANING = ("num_labels", "pooling_strategy", "temperature", "use_lora", "lora_rank", "lora_alpha")
"""Fields that have to be alike for the same weights to mean the same."""


def save_reward_model(model: RewardModel, tokenizer: Any, path: str | os.PathLike[str]) -> None:
    """Write the folder beside its place, then put it there. BadInputError where something else is there."""
    folder = folder_to_write(path, "path", KIND)
    try:
        with replace_folder(folder, KIND) as fresh:
            _write(model, tokenizer, fresh)
    except OSError as error:
        raise CheckpointError(f"{folder}: not saved, {error}; what was there is untouched") from error


def load_weights(model: RewardModel, path: str | os.PathLike[str]) -> None:
    """Put the folder's weights into a model of its kind. BadInputError for another, before any change."""
    folder = _folder(path)
    description = _description(folder)
    here = {"kind": type(model).__name__, **{name: getattr(model.config, name) for name in MEANING}}
    there = {"kind": description["kind"], **{name: description["config"].get(name) for name in MEANING}}
    other = [name for name in here if here[name] != there[name]]
    if other:
        shown = ", ".join(f"{name} {there[name]!r} (the model's is {here[name]!r})" for name in other)
        raise BadInputError(
            f"path={str(path)!r}: holds another reward model: {shown}; build the model alike."
        )
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot be read: {error}") from error
    expected = _weights(model)
    wrong = sorted(expected.keys() ^ weights.keys()) or sorted(
        name for name, value in weights.items() if value.shape != expected[name].shape
    )
    if wrong:
        raise BadInputError(
            f"path={str(path)!r}: its weights are of another base model, {wrong[0]} does not fit; build the "
            "model on the base that it was saved with."
        )
    model.load_state_dict(weights, strict=False)


def load_saved_reward_model(path: str | os.PathLike[str]) -> tuple[RewardModel, Any]:
    """(the model in eval mode on the CPU, its tokenizer) of a folder that save_model wrote.

    Only where the base is a transformers model; with a base of your own build the model yourself and use
    RewardModelTrainer.load_model. Raises BadInputError for a folder that cannot be rebuilt.
    """
    folder = _folder(path)
    description = _description(folder)
    if description["kind"] not in KINDS or not (folder / "config.json").is_file():
        raise BadInputError(
            f"path={str(path)!r}: was saved from a class or base of your own; build the model yourself, then "
            "RewardModelTrainer(...).load_model(path)."
        )
    base = AutoModel.from_config(
        AutoConfig.from_pretrained(folder), dtype=getattr(torch, description["base_dtype"])
    )
    config = RewardModelConfig(**description["config"])
    model = KINDS[description["kind"]](config, base_model=base, **description["arguments"])
    load_weights(model, folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def plain_trunk(model: RewardModel) -> nn.Module:
    """The trunk without the wrapping of adapters."""
    trunk = model.base_model
    return trunk.get_base_model() if model.config.use_lora else trunk


def _write(model: RewardModel, tokenizer: Any, folder: Path) -> None:
    trunk = plain_trunk(model)
    first = next(trunk.parameters(), None)
    description = {
        "kind": type(model).__name__,
        "config": asdict(model.config),
        "arguments": model.arguments(),
        "base_dtype": str(torch.float32 if first is None else first.dtype).removeprefix("torch."),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    save_file(_weights(model), folder / WEIGHTS)
    if isinstance(trunk, PreTrainedModel):
        trunk.config.save_pretrained(folder)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)


def _weights(model: RewardModel) -> dict[str, torch.Tensor]:
    """Copies, because safetensors refuses tensors that share memory."""
    return {
        name: value.detach().cpu().clone().contiguous()
        for name, value in model.state_dict().items()
        if UNUSED not in name.split(".")
    }


def _folder(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise BadInputError(f"path={path!r}: give the folder that save_model wrote.")
    folder = Path(path).expanduser()
    recover_folder(folder)
    if not folder.is_dir():
        raise BadInputError(
            f"path={str(path)!r}: there is no such folder; give the one that save_model wrote."
        )
    for name in (DESCRIPTION, WEIGHTS):
        if not (folder / name).is_file():
            raise BadInputError(
                f"path={str(path)!r}: holds no {name}; give the folder that RewardModelTrainer.save_model "
                "wrote."
            )
    if changed := changed_weights(folder):
        raise CheckpointError(
            f"{folder}: is damaged and cannot be read as it was: {spoilt_words(folder, changed)}."
        )
    return folder


def _description(folder: Path) -> dict[str, Any]:
    try:
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        return {key: description[key] for key in ("kind", "config", "arguments", "base_dtype")}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION}: is damaged: {error!r}") from error
