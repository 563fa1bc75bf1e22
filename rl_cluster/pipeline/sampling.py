"""A prompt goes in, drawn tokens and their log-probabilities come out, a token at a time, with a KV cache."""

from __future__ import annotations

from typing import Any

import torch

from rl_cluster.errors import PipelineError
from rl_cluster.modeling.drawing import truncated
from rl_cluster.pipeline.backend import SampleRequest
from rl_cluster.pipeline.inputs import token_inputs
from rl_cluster.pipeline.model_call import CausalModel, logits_of


@torch.no_grad()
def generate(
    model: CausalModel, request: SampleRequest, device: torch.device, tokenizer: Any = None
) -> tuple[list[int], list[float]]:
    """Until max_tokens, a stop token (kept) or a stop string (kept, up to the token that completes it)."""
    generator = torch.Generator(device)
    generator.manual_seed(request.seed)
    tokens: list[int] = []
    logprobs: list[float] = []
    cache: Any = None
    feed = torch.tensor([request.prompt], device=device)
    caches = model.caches
    while len(tokens) < request.max_tokens:
        if caches:
            logits, cache = model.step(feed, cache)
            caches = cache is not None
        else:
            logits = _without_cache(model, [*request.prompt, *tokens], device)
        token, logprob = draw(logits, request.temperature, request.top_k, request.top_p, generator)
        tokens.append(token)
        logprobs.append(logprob)
        if token in request.stop_token_ids or _ends_with_stop(tokens, request.stop_strings, tokenizer):
            break
        feed = torch.tensor([[token]], device=device)
    return tokens, logprobs


def draw(
    logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> tuple[int, float]:
    """A token of softmax(logits / temperature), restricted to the top_k likeliest (≤ 0: all) and of those to
    the fewest that reach probability top_p; and its log-probability under softmax(logits / temperature)
    *without* the restriction, as a loss at that temperature computes it. temperature 0: the likeliest token,
    its log-probability at temperature 1."""
    logits = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
    if bool(logits.isnan().any()):
        raise PipelineError("sample: the model's logits are NaN; its weights are spoilt")
    if temperature == 0.0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token])
    scaled = logits / temperature
    token = int(torch.multinomial(truncated(scaled, top_k, top_p).softmax(-1), 1, generator=generator))
    return token, float(scaled.log_softmax(-1)[token])


def _without_cache(model: CausalModel, tokens: list[int], device: torch.device) -> torch.Tensor:
    inputs = token_inputs([tokens], None, None, None).to(device)
    return logits_of(model.run(inputs))[0, -1]


def _ends_with_stop(tokens: list[int], stop_strings: tuple[str, ...], tokenizer: Any) -> bool:
    if not stop_strings:
        return False
    text = tokenizer.decode(tokens)
    return any(stop in text for stop in stop_strings)
