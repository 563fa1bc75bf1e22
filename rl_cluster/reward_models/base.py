"""A folder, hub name or module in; a trunk that gives hidden states, with adapters where asked for, out."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl_cluster.errors import BadInputError
from rl_cluster.modeling.loading import load_whole, outside_the_trunk
from rl_cluster.reward_models.config import RewardModelConfig

UNUSED = "pooler"
"""A layer of encoders that pooling by hidden states does not use: neither adapted nor saved."""


def make_trunk(config: RewardModelConfig, base_model: Any) -> nn.Module:
    """The base named by base_model (module, folder or hub name), else by config.model_name.

    A model with a head of its own (causal language model, classifier) gives its trunk; the head is left out.
    With LoRA, adapters are put into the trunk in place. Raises BadInputError for a missing or unusable base.
    """
    trunk = base_model if isinstance(base_model, nn.Module) else _load(config, base_model)
    if isinstance(trunk, PreTrainedModel):
        _check_pretrained(trunk, config)
        trunk = trunk.base_model
    return _with_adapters(trunk, config) if config.use_lora else trunk


def hidden_size(trunk: nn.Module) -> int:
    """From the trunk's config, or its own `hidden_size`; BadInputError where there is neither."""
    size = getattr(_text_config(trunk), "hidden_size", None) or getattr(trunk, "hidden_size", None)
    if isinstance(size, bool) or not isinstance(size, int):
        raise BadInputError(
            f"base_model={type(trunk).__name__}: has no config.hidden_size; set model.hidden_size to the "
            "size of its hidden states."
        )
    return size


def max_positions(trunk: nn.Module) -> int | None:
    """Tokens that the trunk has positions for; None if it does not say."""
    config = _text_config(trunk)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    # RoBERTa and its kin number positions from behind the pad id.
    counts_from_pad = hasattr(getattr(trunk, "embeddings", None), "padding_idx")
    offset = (getattr(config, "pad_token_id", None) or 0) + 1 if counts_from_pad else 0
    return limit - offset


def vocabulary_size(trunk: nn.Module) -> int | None:
    """Rows of the embedding; None if it does not say."""
    size = getattr(_text_config(trunk), "vocab_size", None)
    return size if isinstance(size, int) else None


def hidden_states(
    trunk: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, size: int
) -> torch.Tensor:
    """[B, L, size]: `.last_hidden_state` of the output, or its first entry, or the output itself."""
    output = trunk(input_ids=input_ids, attention_mask=attention_mask)
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        hidden = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(hidden, torch.Tensor) or hidden.shape != (*input_ids.shape, size):
        raise BadInputError(
            f"base_model={type(trunk).__name__}: gives no hidden states [batch, length, {size}]; give a "
            "model whose output has last_hidden_state, as AutoModel's have."
        )
    return hidden


def linear_layers(trunk: nn.Module) -> list[str]:
    """Full names of the layers that adapters go into, whatever the architecture calls them."""
    return [
        name
        for name, module in trunk.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and UNUSED not in name.split(".")
    ]


def _text_config(trunk: nn.Module) -> Any:
    config: Any = getattr(trunk, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _load(config: RewardModelConfig, base_model: Any) -> PreTrainedModel:
    name = config.model_name if base_model is None else base_model
    if not isinstance(name, str | os.PathLike) or not str(name):
        raise BadInputError(
            f"base_model={base_model!r:.60}: give a torch module, a model folder or a hub name, or set "
            "RewardModelConfig.model_name."
        )
    return load_whole(
        AutoModel,
        str(name),
        where=f"RewardModelConfig.model_name={str(name)!r}:",
        may_lack=lambda model, key: UNUSED in key.split("."),
        may_leave=outside_the_trunk,
        dtype=getattr(torch, config.dtype),
    )


def _check_pretrained(model: PreTrainedModel, config: RewardModelConfig) -> None:
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise BadInputError(
            f"base_model={kind}: is an encoder-decoder; give a decoder (as Qwen2) or an encoder (as BERT)."
        )
    if kind.endswith("ForSequenceClassification") and model.config.num_labels != config.num_labels:
        raise BadInputError(
            f"RewardModelConfig.num_labels={config.num_labels}: contradicts the base {kind}, which has "
            f"{model.config.num_labels}; set them alike, or give its trunk (model.base_model)."
        )


def _with_adapters(trunk: nn.Module, config: RewardModelConfig) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # imports deepspeed where it is installed: only on demand

    targets = linear_layers(trunk)
    if not targets:
        raise BadInputError(
            f"RewardModelConfig.use_lora=True: {type(trunk).__name__} has no linear layer to adapt; set it "
            "to False."
        )
    adapters = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        fan_in_fan_out=all(isinstance(trunk.get_submodule(name), Conv1D) for name in targets),
    )
    return get_peft_model(trunk, adapters, autocast_adapter_dtype=False)
