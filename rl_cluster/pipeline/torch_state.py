"""Weights, optimizer, scheduler, pending gradients and random state of a module to files and back.

model.safetensors, optimizer.pt (only once an optimizer has stepped) and state.pt; the .pt files hold tensors
and plain values alone and are read with weights_only=True, so loading runs no code.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.pipeline.backend import Accumulation, SavedState
from rl_cluster.pipeline.rollback import RandomState

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.pt", "state.pt"


@dataclass(frozen=True)
class TorchState:
    """unclaimed: state dictionaries of an optimizer and scheduler that were loaded before they exist here."""

    step: int
    accumulation: Accumulation
    optimizer: Any
    scheduler: Any
    unclaimed: dict[str, Any] | None


def write_torch_state(folder: Path, module: nn.Module, device: torch.device, state: TorchState) -> SavedState:
    """Fill the folder. Raises CheckpointError for what cannot be written without pickling objects, and for
    weights that are not finite."""
    for name, parameter in module.named_parameters():
        if not bool(parameter.detach().isfinite().all()):
            raise CheckpointError(f"the weights are not finite ({name}); load_state() a saved state")
    save_file(_unique_tensors(module), folder / MODEL, metadata={"format": "pt"})
    optimizer = state.unclaimed
    if state.optimizer is not None:
        scheduler: dict[str, Any] = getattr(state.scheduler, "state_dict", dict)()
        optimizer = {"optimizer": state.optimizer.state_dict(), "scheduler": scheduler or None}
    if optimizer is not None:
        _save_plain(optimizer, folder / OPTIMIZER, "the optimizer's or the scheduler's state")
    random = RandomState.now(device)
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    _save_plain(
        {
            "step": state.step,
            "accumulation": dict(vars(state.accumulation)),
            "gradients": gradients if state.accumulation.calls > 0 else {},
            "random_cpu": random.cpu,
            "random_cuda": random.cuda,
        },
        folder / STATE,
        "the pipeline's state",
    )
    return SavedState(MODEL, None if optimizer is None else OPTIMIZER, STATE)


def read_torch_state(
    folder: Path, module: nn.Module, device: torch.device, optimizer: Any, scheduler: Any
) -> TorchState:
    """Check all files, then put them into module, optimizer and scheduler (None: `unclaimed` keeps it).

    Raises BadInputError (a file is missing, another model's weights) and CheckpointError (damaged).
    """
    tensors = _read(folder / MODEL, lambda path: load_file(path))
    state = _read(folder / STATE, _load_plain)
    saved = _read(folder / OPTIMIZER, _load_plain) if (folder / OPTIMIZER).exists() else None
    _put_weights(folder, module, tensors)
    _put_gradients(folder, module, state["gradients"])
    unclaimed = saved
    if saved is not None and optimizer is not None:
        try:
            optimizer.load_state_dict(saved["optimizer"])
        except ValueError as error:
            raise BadInputError(f"path: the optimizer in {folder} is another one ({error})") from error
        if scheduler is not None and saved["scheduler"] is not None:
            scheduler.load_state_dict(saved["scheduler"])
        unclaimed = None
    RandomState(
        device, state["random_cpu"], state["random_cuda"] if device.type == "cuda" else None
    ).restore()
    return TorchState(state["step"], Accumulation(**state["accumulation"]), optimizer, scheduler, unclaimed)


def _read(path: Path, load: Any) -> Any:
    if not path.is_file():
        raise BadInputError(f"path: {path} is missing; {path.parent} is no checkpoint of save_state")
    try:
        return load(path)
    except (SafetensorError, RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged, {error}; load another checkpoint") from error


def _load_plain(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _save_plain(value: dict[str, Any], path: Path, what: str) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getbuffer()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path.name}: {what} holds objects that cannot be read back safely: {error}"
        ) from error
    path.write_bytes(buffer.getbuffer())


def _unique_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state dictionary on the CPU, tensors that share their memory once."""
    result: dict[str, torch.Tensor] = {}
    for names, tensor in _tied(module):
        result[names[0]] = tensor.detach().to("cpu", copy=True).contiguous()
    return result


def _tied(module: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Each distinct tensor of the state dictionary with all of its names."""
    groups: dict[Any, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{name}: the model's extra state is not a tensor and cannot be saved")
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() > 0 else name
        groups.setdefault(key, ([], tensor))[0].append(name)
    return list(groups.values())


@torch.no_grad()
def _put_weights(folder: Path, module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    pairs, known = [], set()
    for names, tensor in _tied(module):
        found = next((name for name in names if name in tensors), None)
        saved = None if found is None else tensors[found]
        if saved is None or saved.shape != tensor.shape:
            what = (
                "is not in it"
                if saved is None
                else f"has shape {tuple(saved.shape)}, not {tuple(tensor.shape)}"
            )
            raise BadInputError(f"path: {folder} is of another model, {names[0]} {what}")
        known.update(names)
        pairs.append((tensor, saved))
    if extra := sorted(set(tensors) - known):
        raise BadInputError(f"path: {folder} is of another model, this one has no {extra[0]}")
    for tensor, saved in pairs:
        tensor.copy_(saved)


def _put_gradients(folder: Path, module: nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    parameters = dict(module.named_parameters())
    if extra := sorted(set(gradients) - set(parameters)):
        raise BadInputError(f"path: {folder} is of another model, this one has no {extra[0]}")
    for name, parameter in parameters.items():
        saved = gradients.get(name)
        parameter.grad = None if saved is None else saved.to(parameter.device, parameter.dtype)
