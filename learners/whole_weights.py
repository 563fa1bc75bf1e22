"""A learner rank in; on rank 0 a copy of its trained weights on the CPU out, by name."""

from __future__ import annotations

import torch

from learners.rank import LearnerRank
from learners.weight_groups import module_groups
from rl_cluster.modeling.policy import PolicyModel

VALUE_HEAD = "value_head."
"""What the names of a shared value head's weights begin with."""


def whole_weights(rank: LearnerRank) -> dict[str, torch.Tensor] | None:
    """Collective; None on the other ranks. Names as in the module (under LoRA: the adapters alone)."""
    copies: dict[str, torch.Tensor] = {}
    for group in module_groups(rank.model, rank.engine):
        if rank.rank == 0:
            copies |= {name: _copy(tensor) for name, tensor in group}
    head = rank.model.value_head if isinstance(rank.model, PolicyModel) else None
    if head is not None:
        named = list(head.named_parameters())
        with rank.engine.gathered([parameter for _, parameter in named]):
            copies |= {VALUE_HEAD + name: _copy(parameter) for name, parameter in named}
    return copies if rank.rank == 0 else None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
