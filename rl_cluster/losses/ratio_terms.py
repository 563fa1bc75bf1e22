"""Log-probabilities of two policies, as a caller gives them, checked and brought to one shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_cluster.algorithms.kl import log_ratio, safe_logprobs
from rl_cluster.algorithms.losses import policy_ratio
from rl_cluster.errors import BadInputError


def same_shape(name: str, reference: torch.Tensor, value: torch.Tensor, field: str) -> torch.Tensor:
    """value in the shape of reference: as it is, or one number per row ([B] or [B, 1]) spread over [B, L]."""
    if value.shape == reference.shape:
        return value
    if reference.dim() == 2 and value.shape in ((reference.shape[0],), (reference.shape[0], 1)):
        return value.reshape(-1, 1).expand(reference.shape)
    raise BadInputError(
        f"{name}: {field} has shape {tuple(value.shape)}, log_probs {tuple(reference.shape)}. "
        "They must agree; log-probabilities are those of the drawn tokens, not of the vocabulary."
    )


def importance_ratio(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, max_log_ratio: float | None = None
) -> torch.Tensor:
    """π / π_old at each token, finite whatever comes in; max_log_ratio bounds its logarithm from above.

    Where the bound holds the ratio's value is the bound, and its gradient that of bound · log π.
    """
    level = log_ratio(log_probs.detach(), old_log_probs.detach())
    if max_log_ratio is not None:
        level = level.clamp(max=max_log_ratio)
    return policy_ratio(level, safe_logprobs(log_probs), torch.ones_like(level))


def temper_log_ratio(arguments: Mapping[str, Any], old: str, temperature: float) -> dict[str, Any]:
    """log_probs moved so that its log-ratio to arguments[old] is divided by the temperature."""
    if temperature == 1.0:
        return dict(arguments)
    base = safe_logprobs(arguments[old])
    moved = base + log_ratio(arguments["log_probs"], arguments[old]) / temperature
    return dict(arguments) | {"log_probs": moved}
