"""Inside vLLM's worker: what was handed to the model's loader, and whether the model serves exactly that.

Loading fuses, shards, transposes and (on CPUs) packs tensors into forms that only a product can read. So what
is served is read back as sums that do not depend on the order (rl_cluster/weights/digest.py), group by group
of modules; a packed layer is read by multiplying unit vectors, which gives columns of its weight exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_cluster.weights.digest import digest, sum_of_values

NUM_COLUMNS = 4
"""Columns of a packed layer that are read back, other ones with each version."""
ELSEWHERE = "*"
"""The group of all that have no counterpart of their name."""


@dataclass
class _Sums:
    """Of one group. whole: of all numbers. columns: of matrices only the columns to be read back."""

    whole: int = 0
    columns: int = 0

    def add(self, tensor: torch.Tensor, version: int) -> None:
        total = sum_of_values(tensor)
        self.whole += total
        self.columns += _sum_of_columns(tensor[:, _columns(tensor, version)]) if tensor.ndim == 2 else total


@dataclass
class _Handed:
    """Of one version: name -> digest, group -> sums."""

    version: int
    digests: dict[str, int] = field(default_factory=dict)
    groups: dict[str, _Sums] = field(default_factory=dict)


class ServedWeights:
    """`watch` before the tensors of a version come, `proof` after they are loaded. model: as it is served."""

    def __init__(self, model: torch.nn.Module, whole: bool) -> None:
        """whole: this process holds all of every tensor; a shard cannot be compared with what was handed."""
        self._model: Any = model
        self._whole = whole
        self._handed = _Handed(-1)
        self._transformed: set[str] | None = None

    def watch(self, version: int) -> None:
        """From now on, and until `proof`, what comes to the model's load_weights belongs to `version`."""
        self._handed = _Handed(version)
        self._unwatch()
        load = self._model.load_weights
        self._model.load_weights = lambda weights: load(self._noted(weights))

    def proof(self) -> dict[str, Any]:
        """version, digests by name, and stale: groups of modules that do not serve what was handed."""
        self._unwatch()
        handed = self._handed
        return {"version": handed.version, "digests": handed.digests, "stale": self._stale()}

    def _unwatch(self) -> None:
        self._model.__dict__.pop("load_weights", None)

    def _noted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._handed.digests[name] = digest(tensor)
            if self._whole:
                self._handed.groups.setdefault(_group(name), _Sums()).add(tensor, self._handed.version)
            yield name, tensor

    @torch.no_grad()
    def _stale(self) -> list[str]:
        if not self._whole:
            return _unlike_their_weight(self._model, self._handed.version)
        served, packed = _served(self._model, self._handed.version)
        handed = _by_served_group(self._handed.groups, served)
        differing = set()
        for group, sums in handed.items():
            found = served.get(group, _Sums())
            difference = (
                found.columns - sums.columns if packed & {group, ELSEWHERE} else found.whole - sums.whole
            )
            if difference % 2**32:
                differing.add(group)
        if self._transformed is None:
            # Some architectures store functions of a weight (Mamba's A): those groups never agree.
            self._transformed = differing if 2 * len(differing) <= len(handed) else set()
        return sorted(differing - self._transformed) + _unlike_their_weight(self._model, self._handed.version)


def _group(name: str) -> str:
    """The module around the one that has the parameter, which fused layers share with their parts."""
    return ".".join(name.split(".")[:-2])


def _columns(matrix_or_width: torch.Tensor | int, version: int) -> torch.Tensor:
    """int64 [NUM_COLUMNS], by the width alone, so that the parts of a fused matrix have the same."""
    width = matrix_or_width if isinstance(matrix_or_width, int) else matrix_or_width.shape[1]
    generator = torch.Generator().manual_seed(version * 1_000_003 + width)
    return torch.randint(width, (NUM_COLUMNS,), generator=generator)


def _served(model: torch.nn.Module, version: int) -> tuple[dict[str, _Sums], set[str]]:
    """The sums of each group, every parameter once; and the groups that can be read by columns only."""
    groups: dict[str, _Sums] = {}
    packed: set[str] = set()
    seen: set[int] = set()
    for path, module in model.named_modules():
        group = _group(f"{path}.parameter")
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in seen or parameter.numel() == 0:
                continue
            seen.add(id(parameter))
            groups.setdefault(group, _Sums()).add(parameter, version)
        width = _width_if_packed(module)
        if width is not None:
            packed.add(group)
            columns = _sum_of_columns(_read_columns(module, width, version))
            groups.setdefault(group, _Sums()).columns += columns
    return groups, packed


def _by_served_group(handed: dict[str, _Sums], served: dict[str, _Sums]) -> dict[str, _Sums]:
    """The handed sums under the nearest group that the model has; what nothing fits to goes together. Served
    groups that then have no counterpart join those."""
    result: dict[str, _Sums] = {}
    for name, sums in handed.items():
        group = name
        while group and group not in served:
            group = group.rpartition(".")[0]
        key = group if group in served and (group or not name) else ELSEWHERE
        total = result.setdefault(key, _Sums())
        total.whole, total.columns = total.whole + sums.whole, total.columns + sums.columns
    if ELSEWHERE in result:
        rest = [sums for group, sums in served.items() if group not in result]
        served[ELSEWHERE] = _Sums(sum(s.whole for s in rest), sum(s.columns for s in rest))
    return result


def _sum_of_columns(columns: torch.Tensor) -> int:
    """A product gives 0 for −0."""
    return sum_of_values(columns + 0.0)


def _width_if_packed(module: Any) -> int | None:
    """Inputs of a CPU layer whose weight has gone into a packed form (vLLM leaves an empty one behind)."""
    weight = module._parameters.get("weight")
    if not hasattr(module, "cpu_linear") or weight is None or weight.numel() > 0:
        return None
    return int(getattr(module, "input_size_per_partition", None) or module.input_size)


def _read_columns(module: Any, width: int, version: int) -> torch.Tensor:
    """[NUM_COLUMNS, N]: what the layer makes of unit vectors, by the very function that serves."""
    weight = module._parameters["weight"]
    units = torch.zeros(NUM_COLUMNS, width, dtype=weight.dtype, device=weight.device)
    units[torch.arange(NUM_COLUMNS), _columns(width, version)] = 1
    return module.cpu_linear(units, weight, None)


def _unlike_their_weight(model: torch.nn.Module, version: int) -> list[str]:
    """Packed CPU layers beside whose packed form the weight still stands (output heads), and differs."""
    unlike = []
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if not hasattr(module, "cpu_linear") or weight is None or weight.ndim != 2 or weight.numel() == 0:
            continue
        columns = weight[:, _columns(weight, version)].T
        if not torch.equal(_read_columns(module, weight.shape[1], version), columns):
            unlike.append(path)
    return unlike
