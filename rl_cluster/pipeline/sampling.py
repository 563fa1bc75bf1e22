"""A prompt goes in, drawn tokens and their log-probabilities come out, a token at a time, with a KV cache."""

from __future__ import annotations

from typing import Any

import torch

from rl_cluster.errors import NonFiniteError, PipelineError
from rl_cluster.modeling.drawing import draw, require_finite, sample_noise
from rl_cluster.pipeline.backend import SampleRequest
from rl_cluster.pipeline.inputs import token_inputs
from rl_cluster.pipeline.model_call import CausalModel, logits_of


@torch.no_grad()
def generate(
    model: CausalModel, request: SampleRequest, device: torch.device, tokenizer: Any = None
) -> tuple[list[int], list[float]]:
    """Until max_tokens, a stop token (kept) or a stop string (kept, up to the token that completes it)."""
    noise = torch.from_numpy(sample_noise(request.seed % 2**63, request.max_tokens)).to(device)
    tokens: list[int] = []
    logprobs: list[float] = []
    cache: Any = None
    feed = torch.tensor([request.prompt], device=device)
    caches = model.caches_for(request.prompt, request.max_tokens, device)
    while len(tokens) < request.max_tokens:
        if caches:
            logits, cache = model.step(feed, cache)
            caches = cache is not None
        else:
            logits = _without_cache(model, [*request.prompt, *tokens], device)
        _refuse_non_finite(logits)
        position = noise[len(tokens)][None]
        drawn, logprob = draw(logits[None], position, request.temperature, request.top_k, request.top_p)
        token = int(drawn)
        tokens.append(token)
        logprobs.append(float(logprob))
        if token in request.stop_token_ids or _ends_with_stop(tokens, request.stop_strings, tokenizer):
            break
        feed = torch.tensor([[token]], device=device)
    return tokens, logprobs


def _refuse_non_finite(logits_V: torch.Tensor) -> None:
    try:
        require_finite(logits_V.to(torch.promote_types(logits_V.dtype, torch.float32)).logsumexp(-1))
    except NonFiniteError as error:
        raise PipelineError(f"sample: {error}") from error


def _without_cache(model: CausalModel, tokens: list[int], device: torch.device) -> torch.Tensor:
    inputs = token_inputs([tokens], None, None, None).to(device)
    return logits_of(model.run(inputs))[0, -1]


def _ends_with_stop(tokens: list[int], stop_strings: tuple[str, ...], tokenizer: Any) -> bool:
    if not stop_strings:
        return False
    text = tokenizer.decode(tokens)
    return any(stop in text for stop in stop_strings)
