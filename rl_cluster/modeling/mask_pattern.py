"""Which mask a decoder of transformers wants for a layer, told instead of built: causal, perhaps in a window.

Packed attention masks by itself. While a model is examined at load, transformers' calls for masks come here,
and each layer's attention compares what would have been masked with what it will mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rl_cluster.errors import BadInputError


class NotPackableError(BadInputError):
    """A decoder wants something of its attention that packed attention does not do."""


@dataclass(frozen=True)
class MaskPattern:
    """Causal; window: and only the last so many places, the token's own included (None: all)."""

    window: int | None

    def check(self, layer: str, sliding_window: int | None) -> None:
        """sliding_window: what the layer hands to its attention function. Raises NotPackableError."""
        if self.window != sliding_window:
            raise NotPackableError(
                f"{layer} is masked with a window of {self.window} and asks for one of {sliding_window}"
            )


def mask_pattern(
    *, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **geometry: Any
) -> MaskPattern:
    """In place of a mask. mask_function: transformers', of (batch, head, query place, key place);
    geometry: the size and type of the mask that is not made. Raises NotPackableError."""
    del geometry
    size = local_size or 100
    steps = sorted({0, 1, 2, *(max(0, n * size + d) for n in (1, 2, 3) for d in (-2, -1, 0, 1, 2))})
    query, key = (
        x.flatten() for x in torch.meshgrid(torch.tensor(steps), torch.tensor(steps), indexing="ij")
    )
    zero = torch.tensor(0)
    wanted = mask_function(zero, zero, query, key)
    ours = key <= query
    if local_size is not None:
        ours = ours & (key > query - local_size)
    if not torch.equal(wanted.cpu().expand_as(ours), ours):
        raise NotPackableError("the model masks attention by more than causality and a sliding window")
    return MaskPattern(local_size)
