"""A failed call leaves no trace: inside `Rollback` the state is recorded, and an exception puts it back.

Gradients are recorded by reference, because the pipeline never writes into an accumulated gradient; buffers,
modes and the random state are small and always copied; parameters and optimizer state are copied only for
calls that can write to them.
"""

from __future__ import annotations

import copy
from types import TracebackType
from typing import Any

import torch
from torch import nn


class Rollback:
    """parameters: which to copy. optimizer, scheduler: copied too when given."""

    def __init__(
        self,
        module: nn.Module,
        parameters: list[torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._scheduler = scheduler

    def __enter__(self) -> Rollback:
        module = self._module
        owned = {id(p): p for p in [*module.parameters(), *self._parameters]}
        self._gradients = [(p, p.grad) for p in owned.values()]
        self._copies = [(t, t.detach().clone()) for t in [*self._parameters, *module.buffers()]]
        self._modes = [(part, part.training) for part in module.modules()]
        self._random = RandomState.now(_device(module))
        self._optimizer_state = None if self._optimizer is None else OptimizerState.of(self._optimizer)
        self._scheduler_state = _scheduler_state(self._scheduler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for tensor, saved in self._copies:
            tensor.copy_(saved)
        for part, mode in self._modes:
            part.training = mode
        if self._optimizer is not None and self._optimizer_state is not None:
            self._optimizer_state.restore(self._optimizer)
        if self._scheduler_state is not None:
            self._scheduler.load_state_dict(self._scheduler_state)
        self._random.restore()


class RandomState:
    """PyTorch's generators: the CPU's and, for a model on a GPU, that GPU's."""

    def __init__(self, device: torch.device, cpu: torch.Tensor, cuda: torch.Tensor | None) -> None:
        self._device, self.cpu, self.cuda = device, cpu, cuda

    @staticmethod
    def now(device: torch.device) -> RandomState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RandomState(device, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self._device)


class OptimizerState:
    """A copy of an optimizer's state and hyper-parameters that goes back into the same tensors."""

    def __init__(self, state: dict[Any, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        self._state, self._groups = state, groups

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> OptimizerState:
        state = {
            p: {key: _copied(value) for key, value in entry.items()} for p, entry in optimizer.state.items()
        }
        groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        return OptimizerState(state, groups)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.clear()
        for parameter, entry in self._state.items():
            optimizer.state[parameter] = {key: _put_back(value) for key, value in entry.items()}
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            for key in [key for key in group if key != "params" and key not in saved]:
                del group[key]
            group.update({key: _put_back(value) for key, value in saved.items()})


def _copied(value: Any) -> tuple[Any, Any]:
    """The object itself and a copy; tensors get their contents back, other objects are replaced."""
    return value, value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _put_back(pair: tuple[Any, Any]) -> Any:
    value, saved = pair
    return value.copy_(saved) if isinstance(value, torch.Tensor) else saved


def _scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    if scheduler is None or not hasattr(scheduler, "load_state_dict"):
        return None
    result: dict[str, Any] | None = copy.deepcopy(scheduler.state_dict())
    return result


def _device(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device
