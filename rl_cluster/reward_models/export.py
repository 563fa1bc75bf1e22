"""A RewardModel on a decoder in; a sequence-classification folder that gives the same rewards out."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rl_cluster.errors import BadInputError
from rl_cluster.files.atomic import folder_atomically
from rl_cluster.files.own_folders import folder_to_write
from rl_cluster.reward_models.folder import plain_trunk
from rl_cluster.reward_models.reward_model import RewardModel, evaluating

TOLERANCE = 1e-4
"""Largest difference of a reward between the two models that counts as rounding, relative to 1 + |reward|."""


@torch.no_grad()
def export_classifier(model: RewardModel, tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """Write an AutoModelForSequenceClassification folder, as `rewards.scorers.path` of a run takes it.

    Its logits are the rewards: the head is linear without bias, so the temperature is folded into it, and
    adapters are merged. Exact only for a plain RewardModel on a decoder with pooling "last", and a tokenizer
    with a pad token that is not its end token: transformers finds the last token by the pad id. Anything
    else, and a model whose exported logits differ on a trial batch, raises BadInputError.
    """
    target = folder_to_write(folder, "folder", "model")
    trunk = _exportable(model, tokenizer)
    config = copy.deepcopy(trunk.config)
    config.num_labels = model.config.num_labels
    config.get_text_config().pad_token_id = tokenizer.pad_token_id
    try:
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=trunk.dtype)
    except ValueError as error:
        raise BadInputError(f"model: transformers has no classifier for {type(trunk).__name__}.") from error
    head = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise BadInputError(
            f"model: the classifier of {type(trunk).__name__} has no plain linear head to fill."
        )
    classifier.base_model.load_state_dict(_merged(model).state_dict())
    head.weight.copy_(model.reward_head[-1].weight / model.config.temperature)
    _compare(model, classifier.eval(), tokenizer.pad_token_id)
    with folder_atomically(target, "model") as partial:
        classifier.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def _exportable(model: Any, tokenizer: Any) -> PreTrainedModel:
    if type(model) is not RewardModel:
        raise BadInputError(f"model={type(model).__name__}: only a plain RewardModel is a classifier.")
    if model.config.pooling_strategy != "last":
        raise BadInputError(
            f"RewardModelConfig.pooling_strategy={model.config.pooling_strategy!r}: classifiers of "
            "transformers read the last token; only 'last' can be exported."
        )
    trunk = plain_trunk(model)
    if not isinstance(trunk, PreTrainedModel):
        raise BadInputError(f"base_model={type(trunk).__name__}: is not a transformers model.")
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None or pad == getattr(tokenizer, "eos_token_id", None):
        raise BadInputError(
            f"tokenizer.pad_token_id={pad!r}: the classifier finds the last token by the pad id; set a pad "
            "token that no text contains and that is not the end token."
        )
    return trunk


def _merged(model: RewardModel) -> nn.Module:
    if not model.config.use_lora:
        return model.base_model
    return copy.deepcopy(model.base_model).merge_and_unload()


def _compare(model: RewardModel, classifier: PreTrainedModel, pad: int) -> None:
    """Two rows of different length through both; BadInputError unless the numbers agree."""
    vocabulary = classifier.config.get_text_config().vocab_size
    known = torch.tensor([token for token in range(min(vocabulary, 64)) if token != pad][-6:])
    ids = torch.stack([known, known.flip(0)])
    mask = torch.ones_like(ids)
    ids[1, -2:], mask[1, -2:] = pad, 0
    device = model.reward_head[-1].weight.device
    classifier.to(device)
    with evaluating(model):
        wanted = model(ids.to(device), mask.to(device), return_dict=False).float()
    got = classifier(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
    # Half precision rounds the head's sum, which stays in float32 here.
    tolerance = TOLERANCE if classifier.dtype in (torch.float32, torch.float64) else 2e-2
    worst = ((got - wanted).abs() / (1 + wanted.abs())).max().item()
    if not worst <= tolerance:
        raise BadInputError(
            f"model: the exported classifier's logits differ by {worst:.2g}; this base model reads texts "
            "in a way of its own. Use RewardModel.as_reward_fn instead."
        )
