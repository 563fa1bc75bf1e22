"""Logits go in, a drawn token per row and its log-probability come out; each sample has noise of its own.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from rl_cluster.errors import NonFiniteError

NOISE_BITS = 52
"""Of each uniform number: the largest is 1 − 2⁻⁵², so that it times a sum never rounds up to the sum."""


def sample_noise(seed: int, num_positions: int) -> np.ndarray:
    """float64 [num_positions], uniform in [0, 1): entry t decides the sample's t-th token.

    The raw stream of numpy's Philox, keyed by the seed: it depends on (seed, position) and nothing else.
    """
    raw = np.random.Philox(key=seed).random_raw(num_positions)
    return (np.atleast_1d(raw) >> np.uint64(64 - NOISE_BITS)) * 2.0**-NOISE_BITS


def truncated(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The logits [..., V], −inf where a token may not be drawn: only the top_k likeliest may (≤ 0: all), and
    of those the fewest that reach probability top_p."""
    if 0 < top_k < logits.shape[-1]:
        kept, places = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, places, kept)
    if top_p < 1.0:
        ordered, places = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        logits = logits.scatter(-1, places, ordered.masked_fill(before >= top_p, -torch.inf))
    return logits


def draw(
    logits_NV: torch.Tensor, noise_N: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64 [N], log-probabilities float32 [N]).

    noise_N: float64, uniform in [0, 1); the token is where the cumulative probability of what top_k and top_p
    leave passes it. The log-probability is that of the whole distribution at the temperature, *before* top_k
    and top_p: what a learner computes, whose losses, ratios and divergences know no truncation.
    temperature 0: the likeliest token (the first of several), its log-probability at temperature 1.
    """
    logits = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if temperature == 0.0:
        tokens = logits.argmax(-1)
        return tokens, _at(logits, tokens)
    scaled = logits if temperature == 1.0 else logits / temperature
    cumulative = truncated(scaled, top_k, top_p).double().softmax(-1).cumsum(-1)
    tokens = torch.searchsorted(cumulative, noise_N[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return tokens, _at(scaled, tokens)


def _at(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    """float32 [N]: as modeling.token_logprobs computes it."""
    normaliser = logits_NV.logsumexp(-1)
    require_finite(normaliser)
    return logits_NV.gather(-1, tokens_N[:, None])[:, 0] - normaliser


def require_finite(normaliser: torch.Tensor) -> None:
    """normaliser: log Σ exp(logits), of any shape, which is finite unless a logit is NaN or +∞, or all of a
    row are −∞. Raises NonFiniteError."""
    if not bool(normaliser.isfinite().all()):
        bad = int((~normaliser.isfinite()).sum())
        raise NonFiniteError(
            f"sampling: the model's logits are not finite (NaN or infinity) for {bad} of "
            f"{normaliser.numel()} sequences; its weights are spoilt. Go on from a checkpoint before, with a "
            "lower optimizer.learning_rate."
        )
