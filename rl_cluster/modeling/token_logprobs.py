"""Hidden states of drawn tokens become log-probabilities and entropies; the logits never exist all at once.

Chunk by chunk, forward and again backward, so that the peak is one chunk of logits whatever the batch.
Legend: A drawn tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from rl_cluster.modeling.logit_map import IDENTITY, LogitMap

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Logits (float32 numbers) that exist at once."""


class _TokenLogprobs(torch.autograd.Function):
    """logits = hidden · weightᵀ + bias, in float32 mapped (where the model does that to its logits) and
    divided by the temperature, as vLLM's processed_logprobs.

    With p = softmax(logits): ∂ log p_y / ∂ logits = onehot(y) − p, and for the entropy
    H = −Σ p log p: ∂H / ∂ logits = −p (log p + H). targets: [A, K], so are the log-probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        logit_map: LogitMap,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num = hidden.shape[0]
        entropy, normalizer = (hidden.new_empty(num, dtype=_working(hidden)) for _ in range(2))
        logprobs = hidden.new_empty(targets.shape, dtype=_working(hidden))
        for start in range(0, num, chunk):
            part = slice(start, start + chunk)
            logits = logits_of(hidden[part], weight, bias, temperature, logit_map)
            normalizer[part] = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(-1, targets[part]) - normalizer[part, None]
            mean_logit = (torch.exp(logits - normalizer[part, None]) * logits).sum(-1)
            entropy[part] = normalizer[part] - mean_logit
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.logit_map, ctx.chunk = temperature, logit_map, chunk
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with_entropy = bool(torch.any(grad_entropy != 0))
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_working(hidden)) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=_working(hidden)) if needs_bias else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = logits_of(hidden[part], weight, bias, 1.0, ctx.logit_map)
            mapped = logits if ctx.logit_map.cap is None else logits.clone()
            if ctx.temperature != 1.0:
                logits /= ctx.temperature
            logits -= normalizer[part, None]
            probabilities = torch.exp(logits)
            grad = probabilities * -grad_logprobs[part].sum(-1, keepdim=True)
            grad.scatter_add_(1, targets[part], grad_logprobs[part])
            if with_entropy:
                grad -= grad_entropy[part, None] * probabilities * (logits + entropy[part, None])
            grad = ctx.logit_map.pull_back(grad / ctx.temperature, mapped).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _working(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def logits_of(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    logit_map: LogitMap = IDENTITY,
) -> torch.Tensor:
    """[A, V], in float32 at least, mapped, then divided by the temperature."""
    logits = logit_map.apply(linear(hidden, weight, bias).to(_working(hidden)))
    return logits if temperature == 1.0 else logits.div_(temperature)


def chunk_size(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    """Tokens whose logits may exist at once."""
    return int(max(1, CHUNK_ELEMENTS[hidden.device.type] // weight.shape[0]))


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk_elements: int | None = None,
    logit_map: LogitMap = IDENTITY,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and entropy of its distribution, both float32 [A], in nats.

    hidden: [A, D], the states from which the targets (int64 [A]) are predicted; of K targets per state
    (int64 [A, K]) the log-probabilities are [A, K], from the same logits. weight: [V, D]; bias: [V].
    logit_map: what the model does to its logits before the softmax.
    Both results carry gradient to hidden, weight and bias.
    """
    chunk = max(1, chunk_elements // weight.shape[0]) if chunk_elements else chunk_size(hidden, weight)
    several = targets if targets.dim() == 2 else targets[:, None]
    logprobs: torch.Tensor
    entropy: torch.Tensor
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, several, temperature, logit_map, chunk)
    return logprobs if targets.dim() == 2 else logprobs.squeeze(1), entropy
