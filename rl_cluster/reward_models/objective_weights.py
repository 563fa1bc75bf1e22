"""Weights as they were given: a list that equals what the caller wrote, and that torch takes for a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError


class ObjectiveWeights(list[float]):
    """Numbers, one per objective. Equal to a list or tuple of the same numbers; torch's functions, operators
    and a tensor's methods (sum, to, shape …) take it as float32 [n]. What lists have is as of lists."""

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what numpy, pickle and torch look for tells kinds apart
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(_tensor(self), name)

    def __add__(self, other: Any) -> Any:
        return list(self) + other if isinstance(other, list) else _tensor(self) + other

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return function(*map(_tensor, arguments), **{k: _tensor(v) for k, v in (named or {}).items()})


def _tensor(value: Any) -> Any:
    """Weights as tensors, also inside what torch.stack and torch.cat take."""
    if isinstance(value, ObjectiveWeights):
        return torch.tensor(list(value))
    return type(value)(map(_tensor, value)) if type(value) in (list, tuple) else value


def _of_tensors(name: str) -> Callable[..., Any]:
    def operator(self: ObjectiveWeights, *others: Any) -> Any:
        return getattr(_tensor(self), name)(*map(_tensor, others))

    return operator


_ARITHMETIC = ("mul", "rmul", "radd", "sub", "rsub", "truediv", "rtruediv", "pow", "matmul", "rmatmul")
for _name in (*_ARITHMETIC, "neg", "abs", "lt", "le", "gt", "ge"):
    setattr(ObjectiveWeights, f"__{_name}__", _of_tensors(f"__{_name}__"))


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
