"""Losses of training on fixed data, as pure functions: torch tensors in, a loss per pair or per row out.

Legend: A drawn tokens, R rows (sequences), P = R / 2 pairs; pair i is the rows 2i (chosen) and 2i + 1
(rejected). No config object, no reduction: preference_objectives.py weighs and sums.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

MAX_MEAN_LOGPROB = -1e-6
"""The mean log-probability of a response is held below this, so that its odds stay finite."""


def row_totals(values_A: torch.Tensor, row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """float32 [R]: the sum over each row's tokens, added up in float64."""
    total = torch.zeros(num_rows, dtype=torch.float64, device=values_A.device)
    return total.index_add(0, row, values_A.double()).to(torch.float32)


def row_lengths(row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """float32 [R]: drawn tokens per row, at least 1."""
    return torch.bincount(row, minlength=num_rows).clamp(min=1).to(torch.float32)


def sigmoid_loss(delta: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """−(1−ε) log σ(βΔ) − ε log σ(−βΔ), with Δ the chosen minus the rejected log-ratio, summed over tokens.

    DPO: Rafailov et al. 2023, equation 7; ε > 0 is the conservative DPO of Mitchell 2023, where a label is
    wrong with probability ε.
    """
    right, wrong = logsigmoid(beta * delta), logsigmoid(-beta * delta)
    return -(1.0 - label_smoothing) * right - label_smoothing * wrong


def ipo_loss(delta: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """(Δ − 1/(2β))². IPO: Azar et al. 2023, equation 17 (their τ is β).

    Δ here is the difference of the log-ratios *per token* (each divided by its response's length), the form
    that its authors recommended to public implementations.
    """
    del label_smoothing
    return (delta - 1.0 / (2.0 * beta)).square()


def hinge_loss(delta: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """max(0, 1 − βΔ). SLiC: Zhao et al. 2023, on the normalised likelihood."""
    del label_smoothing
    return torch.relu(1.0 - beta * delta)


PAIR_LOSSES = {"sigmoid": sigmoid_loss, "ipo": ipo_loss, "hinge": hinge_loss}
"""name -> f(Δ [P], β, label smoothing) -> [P]."""

LENGTH_AVERAGED = frozenset({"ipo"})
"""Losses whose log-ratios are means over the response's tokens, not sums."""


def log_odds(mean_logprobs: torch.Tensor) -> torch.Tensor:
    """log(p / (1 − p)) with p = exp(mean log-probability of a response's tokens), finite for p → 1."""
    logprobs = mean_logprobs.clamp(max=MAX_MEAN_LOGPROB)
    return logprobs - torch.log(-torch.expm1(logprobs))


def odds_ratio_loss(chosen_mean: torch.Tensor, rejected_mean: torch.Tensor) -> torch.Tensor:
    """−log σ(log odds(chosen) − log odds(rejected)); ORPO, Hong et al. 2024, equation 7.

    chosen_mean, rejected_mean: [P], mean log-probability over the response's tokens.
    """
    return -logsigmoid(log_odds(chosen_mean) - log_odds(rejected_mean))


def kto_loss(
    log_ratios: torch.Tensor,
    desirable: torch.Tensor,
    z0: float,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> torch.Tensor:
    """λ_D (1 − σ(β(r − z0))) where desirable, λ_U (1 − σ(β(z0 − r))) elsewhere. [R].

    KTO: Ethayarajh et al. 2024, equations 7 and 8. log_ratios: [R], r = Σ log π − Σ log reference.
    desirable: bool [R]. z0: the estimate of KL(π ‖ reference), not below 0, a constant.
    """
    away = beta * (log_ratios - z0)
    good, bad = 1.0 - torch.sigmoid(away), 1.0 - torch.sigmoid(-away)
    return torch.where(desirable, desirable_weight * good, undesirable_weight * bad)


def bradley_terry_loss(
    chosen_scores: torch.Tensor, rejected_scores: torch.Tensor, margin: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """−log σ(r_chosen − r_rejected − margin); Bradley & Terry 1952, margin: Touvron et al. 2023. [P]."""
    return -logsigmoid(chosen_scores - rejected_scores - margin)
