"""Log-probabilities of two policies go in, estimates of their divergence come out (torch, any shape).

Everything that touches a log-ratio is bounded here, so that -inf − -inf or 0 · inf never make a NaN. A NaN
that came in goes out again: hiding it would train on rubbish.
"""

from __future__ import annotations

from typing import Literal

import torch

from rl_cluster.algorithms.kl_control import AdaptiveKL, FixedKL, KLController, kl_controller

__all__ = [
    "AdaptiveKL",
    "FixedKL",
    "KLController",
    "exact_kl",
    "kl_controller",
    "kl_per_token",
    "log_ratio",
    "safe_exp",
    "safe_logprobs",
]

MAX_LOGPROB = 1e4
"""Log-probabilities are held within ± this; -inf (a token that was masked out) becomes finite."""
MAX_EXPONENT = 20.0
"""exp is taken of at most this (4.9e8), so that ratios, their squares and gradients fit float32."""


def safe_logprobs(logprobs: torch.Tensor) -> torch.Tensor:
    """Within ±MAX_LOGPROB; the gradient outside is 0."""
    return logprobs.clamp(-MAX_LOGPROB, MAX_LOGPROB)


def log_ratio(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log(π / other), finite whatever comes in."""
    return safe_logprobs(logprobs) - safe_logprobs(other)


def safe_exp(exponent: torch.Tensor) -> torch.Tensor:
    """exp(exponent), with the exponent held within ±MAX_EXPONENT."""
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def _k1(d: torch.Tensor) -> torch.Tensor:
    return d


def _k2(d: torch.Tensor) -> torch.Tensor:
    return 0.5 * d.square()


def _k3(d: torch.Tensor) -> torch.Tensor:
    # Only the exponential needs its bound: far above the reference the slope must stay 1, not become 0.
    d = d.clamp(min=-MAX_EXPONENT)
    return torch.expm1(-d) + d


def _abs(d: torch.Tensor) -> torch.Tensor:
    return d.abs()


ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3, "abs": _abs}


def kl_per_token(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    estimator: Literal["k1", "k2", "k3", "abs", "exact"],
) -> torch.Tensor:
    """Estimate of KL(π ‖ reference) in nats at each token, from tokens drawn from π.

    With d = log π − log ref (http://joschu.net/blog/kl-approx.html): k1 = d, unbiased, any sign;
    k2 = ½ d²; k3 = exp(−d) − 1 + d, unbiased, never negative; abs = |d|. The gradient, where asked for, is
    that of the formula with respect to log π.
    """
    assert estimator != "exact", "drawn tokens do not suffice: see exact_kl"
    return ESTIMATORS[estimator](log_ratio(logprobs, reference_logprobs))


def exact_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(π ‖ reference) in nats: Σ π (log π − log ref) over the last axis, the whole vocabulary."""
    return (safe_logprobs(logprobs).exp() * log_ratio(logprobs, reference_logprobs)).sum(-1)
