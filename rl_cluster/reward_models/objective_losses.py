"""Rewards and targets per objective in; the squared error and its parts, an objective each, out."""

from __future__ import annotations

from typing import Any

import torch

from rl_cluster.errors import BadInputError


class ObjectiveLosses(dict[str, torch.Tensor]):
    """{"objective_0": loss, "objective_1": loss, …}, scalars; `tensor` has them all, [n].

    A number as key, and len, shape and tolist, are those of the tensor: losses[1] is losses["objective_1"].
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__({f"objective_{index}": loss for index, loss in enumerate(tensor)})
        self.tensor = tensor

    def __getitem__(self, key: Any) -> torch.Tensor:
        return super().__getitem__(key) if isinstance(key, str) else self.tensor[key]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """torch's functions take it for its tensor."""
        return function(*map(_plain, arguments), **{k: _plain(v) for k, v in (named or {}).items()})

    def __getattr__(self, name: str) -> Any:
        """What a dict has not, the tensor may have: shape, sum, tolist …"""
        if name.startswith("__") or name == "tensor":
            raise AttributeError(name)
        return getattr(self.tensor, name)


def _plain(value: Any) -> Any:
    return value.tensor if isinstance(value, ObjectiveLosses) else value


def multi_objective_loss(
    rewards: torch.Tensor, target_rewards: Any, objective_mask: Any = None
) -> tuple[torch.Tensor, ObjectiveLosses]:
    """As compute_multi_objective_loss, of rewards [B, n]."""
    targets = torch.as_tensor(target_rewards, device=rewards.device).to(rewards.dtype)
    if targets.shape != rewards.shape:
        raise BadInputError(
            f"target_rewards: {tuple(targets.shape)} for rewards {tuple(rewards.shape)}; give one target per "
            "text and objective."
        )
    kept = _kept(objective_mask, rewards)
    if not bool(torch.isfinite(targets[kept]).all()):
        raise BadInputError(
            "target_rewards: holds NaN or infinity; give finite targets, or leave entries out by "
            "objective_mask."
        )
    # where before the square: an excluded NaN would reach the gradient through a product with 0.
    squares = torch.where(kept, rewards - torch.where(kept, targets, rewards.detach()), 0.0) ** 2
    sums, counts = squares.sum(dim=0), kept.sum(dim=0)
    per_objective = torch.where(counts > 0, sums / counts.clamp(min=1), torch.nan)
    return sums.sum() / counts.sum(), ObjectiveLosses(per_objective)


def _kept(objective_mask: Any, rewards: torch.Tensor) -> torch.Tensor:
    if objective_mask is None:
        return torch.ones_like(rewards, dtype=torch.bool)
    mask = torch.as_tensor(objective_mask, device=rewards.device)
    if mask.shape not in (rewards.shape, rewards.shape[1:]):
        raise BadInputError(
            f"objective_mask: {tuple(mask.shape)} for rewards {tuple(rewards.shape)}; give that shape, or "
            "one entry per objective."
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise BadInputError("objective_mask: holds values other than 0 and 1; 1 marks entries that train.")
    if not bool((mask == 1).any()):
        raise BadInputError("objective_mask: keeps nothing; set at least one entry to 1.")
    return (mask == 1).expand_as(rewards)
