"""Weights as they were given: a list that equals what the caller wrote, and that torch takes for a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError


class ObjectiveWeights(list[float]):
    """Numbers, one per objective. Equal to a list or tuple of the same numbers; torch's functions and a
    tensor's operators take it as float32 [n]."""

    def tolist(self) -> list[float]:
        return list(self)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, list | tuple):
            return list(self) == list(other)
        return torch.tensor(list(self)) == other if isinstance(other, torch.Tensor) else NotImplemented

    def __ne__(self, other: object) -> Any:
        same = self.__eq__(other)
        return same if same is NotImplemented else ~same if isinstance(same, torch.Tensor) else not same

    __hash__ = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return function(*map(_tensor, arguments), **{k: _tensor(v) for k, v in (named or {}).items()})


def _tensor(value: Any) -> Any:
    return torch.tensor(list(value)) if isinstance(value, ObjectiveWeights) else value


def check_weights(num_objectives: int, given: Any) -> ObjectiveWeights:
    """None: 1 / n each. BadInputError for anything but num_objectives numbers."""
    if given is None:
        return ObjectiveWeights([1.0 / num_objectives] * num_objectives)
    weights = given.tolist() if isinstance(given, torch.Tensor) else given
    if not isinstance(weights, Sequence) or isinstance(weights, str) or len(weights) != num_objectives:
        raise BadInputError(
            f"objective_weights={given!r:.60}: give {num_objectives} numbers, one per objective."
        )
    for index, weight in enumerate(weights):
        check_number(f"objective_weights[{index}]", weight)
    return ObjectiveWeights(float(weight) for weight in weights)
