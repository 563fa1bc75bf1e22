"""Per-token tensors go in, per-token losses come out: the arithmetic of every loss, torch, no config.

All tensors are [A], the drawn tokens of R rows as in LossInputs. A loss is later summed with the weights of
weights.py. Ratios are bounded in log space (kl.py), so losses and gradients are finite at ±inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rl_cluster.algorithms.kl import log_ratio, safe_exp, safe_logprobs


@dataclass(frozen=True)
class Surrogate:
    """loss: [A], with gradient. clipped: bool [A], True where the clipped branch decided."""

    loss: torch.Tensor
    clipped: torch.Tensor


def row_sum(values: torch.Tensor, row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[A]: at every token the sum over its row. Summed in float64, so that the order hardly matters."""
    total = torch.zeros(num_rows, dtype=torch.float64, device=values.device)
    return total.index_add(0, row, values.double())[row].to(values.dtype)


def row_mean(values: torch.Tensor, row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[A]: at every token the mean over its row."""
    return row_sum(values, row, num_rows) / row_size(row, num_rows)


def row_size(row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """float32 [A]: at every token the number of tokens in its row."""
    return torch.bincount(row, minlength=num_rows)[row].to(torch.float32)


def _token_level(d: torch.Tensor, _row: torch.Tensor, _num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return d, torch.ones_like(d)


def _sequence_level(d: torch.Tensor, row: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return row_sum(d, row, num_rows), row_size(row, num_rows)


def _sequence_mean_level(
    d: torch.Tensor, row: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return row_mean(d, row, num_rows), torch.ones_like(d)


RATIO_LEVELS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "token": _token_level,
    "sequence": _sequence_level,
    "sequence_mean": _sequence_mean_level,
}
"""level -> (log-ratio at every token, share): `share` is how much of its row's gradient a token carries."""


def policy_ratio(level: torch.Tensor, log_prob: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The ratio π / π_old [A] in the token-gradient form s · (1 + share · (log π_t − sg(log π_t))).

    level: log-ratio of RATIO_LEVELS, s = exp(level).

    Its value is s; its gradient reaches only the token itself, with s · share.
    A row's ratio stands at each of its tokens, where weights of mean kind (sequence_mean: 1 / (R T_i)) give
    exactly the row's loss and gradient:
    token: share 1, the ordinary ratio. sequence_mean: share 1, the token form of GSPO (Zheng et al. 2025).
    sequence: share T_i, since exp(Σ log-ratio) moves with every one of the T_i tokens.
    """
    scale = safe_exp(level.detach())
    return scale * (1.0 + share * (log_prob - log_prob.detach()))


def clip_loss(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> Surrogate:
    """max(−A ratio, −A clip(ratio, 1 − low, 1 + high)); PPO, Schulman et al. 2017, equation 7."""
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return Surrogate(torch.maximum(free, held), held > free)


def cispo_loss(
    ratio: torch.Tensor, log_prob: torch.Tensor, advantages: torch.Tensor, greatest: float
) -> Surrogate:
    """−sg(min(ratio, greatest)) A log π; MiniMax-M1 2025, as TRL. Every token keeps a gradient.

    log_prob: log π times the share of the ratio's level (see policy_ratio).
    """
    ratio = ratio.detach()
    held = ratio.clamp(max=greatest)
    return Surrogate(-held * advantages * log_prob, held != ratio)


def sapo_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, temperature_positive: float, temperature_negative: float
) -> Surrogate:
    """−A (4/τ) σ(τ (ratio − 1)), τ by the sign of A; Soft Adaptive Policy Optimization, Gao et al. 2025.

    At ratio 1 the gradient is that of the unclipped surrogate; it fades on both sides, without a clip.
    """
    temperature = torch.where(advantages > 0, temperature_positive, temperature_negative)
    gate = 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0))
    return Surrogate(-advantages * gate, torch.zeros_like(advantages, dtype=torch.bool))


def reinforce_loss(log_prob: torch.Tensor, advantages: torch.Tensor) -> Surrogate:
    """−A log π; Williams 1992. log_prob: log π times the share of the ratio's level (see policy_ratio)."""
    return Surrogate(-advantages * log_prob, torch.zeros_like(advantages, dtype=torch.bool))


def importance_weight(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """min(π_prox / π_behav, cap) at each token, without gradient; 1 where the behaviour is unknown (NaN).

    Decoupled objective: Hilton et al. 2022; AReaL 2025. Truncation: Espeholt et al. 2018.
    """
    return _free_weight(proximal, behaviour).clamp(max=cap)


def weight_truncated(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """bool [A]: where importance_weight is the cap and not the ratio itself."""
    return _free_weight(proximal, behaviour) > cap


def _free_weight(proximal: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    return safe_exp(log_ratio(proximal, behaviour)).masked_fill(behaviour.isnan(), 1.0).detach()


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_value: float
) -> Surrogate:
    """½ max((V − R)², (clip(V, V_old ± clip_value) − R)²) at each token, as TRL's PPO."""
    held_values = old_values + (values - old_values).clamp(-clip_value, clip_value)
    free, held = (values - returns).square(), (held_values - returns).square()
    return Surrogate(0.5 * torch.maximum(free, held), held > free)


def cross_entropy_loss(logprobs: torch.Tensor) -> torch.Tensor:
    """−log π of each token [A], in nats."""
    return -safe_logprobs(logprobs)
