"""Weights under the names of a module go in; the same under the names of its checkpoints come out.

transformers loads some architectures into modules of another shape than their files: experts are stacked,
layers renamed. Files and engines have to see what was in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def checkpoint_named(
    model: nn.Module | None, named: Sequence[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    """named: of one layer, or all, never a part of one. model: what they are the weights of, None where they
    are no model's (adapters). Tensors on the meta device give the shapes."""
    if not isinstance(model, PreTrainedModel) or not getattr(model, "_weight_conversions", None):
        return list(named)
    return [
        (name, tensor.contiguous()) for name, tensor in revert_weight_conversion(model, dict(named)).items()
    ]


def persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those that belong to a checkpoint, such as the bias that balances experts."""
    saved = model.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
