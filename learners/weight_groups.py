"""The trained model's weights under the names of its checkpoint, whole, one layer group at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from learners.engine import Engine
from rl_cluster.modeling.checkpoint_names import checkpoint_named, persistent_buffers
from rl_cluster.modeling.policy import CriticModel, PolicyModel, base_model, is_lora
from rl_cluster.modeling.score_model import ScoreModel


@dataclass(frozen=True)
class WeightMetadata:
    """name: as in the checkpoint (under LoRA: as in a peft adapter). shape: of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Trained = PolicyModel | CriticModel | ScoreModel


def named_weights(module: Trained) -> list[tuple[str, torch.Tensor]]:
    """What is published and exported, in a fixed order, each tensor once (a tied head is the embedding),
    under the names of the module.

    Full training: every parameter and persistent buffer of the language model (or of a critic's trunk),
    without the value head. LoRA: the adapters (and a reward model's score) only, under peft's names.
    """
    whole = _whole_model(module)
    if whole is not None:
        return [*whole.named_parameters(), *persistent_buffers(whole)]
    assert not isinstance(module, CriticModel)
    adapter = module.lm.active_adapter
    return [
        (name.replace(f".{adapter}.", ".").replace(".modules_to_save.", "."), parameter)
        for name, parameter in module.lm.named_parameters()
        if parameter.requires_grad
    ]


def weight_metadata(module: Trained, engine: Engine) -> list[WeightMetadata]:
    """Of what weight_groups yields, in its order; gathers nothing."""
    whole = _whole_model(module)
    result = []
    for group in grouped(named_weights(module)):
        shapes = [(n, torch.empty(engine.shape(t), dtype=t.dtype, device="meta")) for n, t in group]
        result += [WeightMetadata(n, tuple(t.shape), t.dtype) for n, t in checkpoint_named(whole, shapes)]
    return result


def weight_groups(module: Trained, engine: Engine) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Embeddings, then each decoder layer, then the rest. Collective: every rank must run through all of it.

    A group's tensors are whole on every rank until the next group is asked for, then they are gone: copy
    what must stay. So the peak extra memory is one group.
    """
    whole = _whole_model(module)
    for group in module_groups(module, engine):
        yield checkpoint_named(whole, group)


def module_groups(module: Trained, engine: Engine) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """As weight_groups, under the names of the module in place of the checkpoint's."""
    for group in grouped(named_weights(module)):
        with engine.gathered([tensor for _, tensor in group]):
            yield [(name, tensor.data) for name, tensor in group]


def _whole_model(module: Trained) -> nn.Module | None:
    """The model of transformers that is published and exported; None where only adapters are."""
    if isinstance(module, CriticModel):
        return module.trunk
    return None if is_lora(module.lm) else base_model(module.lm)


def grouped(named: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """By the first number in the name (the layer); what has none goes before or after the layers."""
    before: list[tuple[str, torch.Tensor]] = []
    after: list[tuple[str, torch.Tensor]] = []
    layers: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in named:
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if layer is not None:
            layers.setdefault(layer, []).append((name, parameter))
        else:
            (after if layers else before).append((name, parameter))
    return [group for group in [before, *(layers[i] for i in sorted(layers)), after] if group]
