"""vLLM's samplers, taught to report the log-probability of a token among all tokens, at the temperature.

With logprobs_mode "processed_logprobs" vLLM reports it among those that top-k and top-p have left. The
learner and the sampler of the local backend (modeling/drawing.py) know the whole distribution, and so do KL
and ratios. Runs inside vLLM's worker; imports no vLLM. Legend: N requests, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

SECOND_RUNNER = (
    "processed_logits",
    "expanded_idx_mapping",
    "idx_mapping_np",
    "pos",
    "top_k",
    "top_p",
    "use_fused_sampler",
)
"""What `_sample_random` of vLLM's second model runner takes."""


def report_whole_logprobs(sampler: Any) -> bool:
    """Once per engine. False: an unknown sampler, left as it is."""
    inner = getattr(sampler, "topk_topp_sampler", None)
    if inner is not None and list(inspect.signature(inner.forward).parameters)[2:] == ["k", "p"]:
        inner.forward = _whole_logprobs(inner.forward)
        return True
    draw = getattr(sampler, "_sample_random", None)
    if draw is not None and tuple(inspect.signature(draw).parameters) == SECOND_RUNNER:
        sampler._sample_random = _whole_logits(draw)
        return True
    return False


def _whole_logprobs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Of TopKTopPSampler.forward: logits [N, V] at the temperature in, tokens and log-probabilities out."""

    def wrapped(logits: Any, generators: Any, k: Any, p: Any) -> Any:
        if k is None and p is None:
            return forward(logits, generators, k, p)
        # Before the call: it may overwrite the logits.
        whole = logits.float().log_softmax(-1)
        tokens, logprobs = forward(logits, generators, k, p)
        return tokens, None if logprobs is None else whole

    return wrapped


def _whole_logits(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Of the second runner's _sample_random, which returns the logits that it drew from."""

    def wrapped(processed_logits: Any, *others: Any) -> Any:
        top_k, top_p = others[3], others[4]
        if top_k is None and top_p is None:
            return draw(processed_logits, *others)
        whole = processed_logits.clone()
        tokens, _ = draw(processed_logits, *others)
        return tokens, whole

    return wrapped
