"""The trained model's parameters under their Hugging Face names, whole, one layer group at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from learners.engine import Engine
from rl_cluster.modeling.policy import CriticModel, PolicyModel, base_model, is_lora
from rl_cluster.modeling.score_model import ScoreModel


@dataclass(frozen=True)
class WeightMetadata:
    """name: as in the checkpoint (under LoRA: as in a peft adapter). shape: of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def named_weights(module: PolicyModel | CriticModel | ScoreModel) -> list[tuple[str, nn.Parameter]]:
    """What is published and exported, in a fixed order, each tensor once (a tied head is the embedding).

    Full training: every parameter of the language model (or of a critic's trunk), without the value head.
    LoRA: the adapters (and a reward model's score) only, under peft's names.
    """
    if isinstance(module, CriticModel):
        return list(module.trunk.named_parameters())
    if not is_lora(module.lm):
        return list(base_model(module.lm).named_parameters())
    adapter = module.lm.active_adapter
    return [
        (name.replace(f".{adapter}.", ".").replace(".modules_to_save.", "."), parameter)
        for name, parameter in module.lm.named_parameters()
        if parameter.requires_grad
    ]


def weight_metadata(module: PolicyModel | CriticModel | ScoreModel, engine: Engine) -> list[WeightMetadata]:
    """Of named_weights, in the order in which weight_groups yields; gathers nothing."""
    return [
        WeightMetadata(name, engine.shape(parameter), parameter.dtype)
        for group in grouped(named_weights(module))
        for name, parameter in group
    ]


def weight_groups(
    module: PolicyModel | CriticModel | ScoreModel, engine: Engine
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Embeddings, then each decoder layer, then the rest. Collective: every rank must run through all of it.

    A group's tensors are whole on every rank until the next group is asked for, then they are gone: copy
    what must stay. So the peak extra memory is one group.
    """
    for group in grouped(named_weights(module)):
        with engine.gathered([parameter for _, parameter in group]):
            yield [(name, parameter.data) for name, parameter in group]


def grouped(named: list[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """By the first number in the name (the layer); what has none goes before or after the layers."""
    before: list[tuple[str, nn.Parameter]] = []
    after: list[tuple[str, nn.Parameter]] = []
    layers: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if layer is not None:
            layers.setdefault(layer, []).append((name, parameter))
        else:
            (after if layers else before).append((name, parameter))
    return [group for group in [before, *(layers[i] for i in sorted(layers)), after] if group]
