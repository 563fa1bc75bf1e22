"""Plain arguments of the pipeline's calls are checked here; each error names argument, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rl_cluster.errors import BadInputError
from rl_cluster.pipeline.backend import SampleRequest
from rl_cluster.pipeline.inputs import as_tensor, token_inputs


def check_positive_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInputError(f"{name}: {value!r} must be a whole number of at least 1")


def norm_limit(max_grad_norm: Any) -> float:
    """0.0 stands for no clipping."""
    if max_grad_norm is None:
        return 0.0
    number = isinstance(max_grad_norm, (int, float)) and not isinstance(max_grad_norm, bool)
    if not number or math.isnan(max_grad_norm) or max_grad_norm < 0:
        raise BadInputError(
            f"max_grad_norm: {max_grad_norm!r} must be a number of at least 0; None does not clip"
        )
    return 0.0 if math.isinf(max_grad_norm) else float(max_grad_norm)


def choose_device(module: nn.Module, device: str | torch.device | None) -> torch.device:
    """device, or where the model is if that is an accelerator, or the GPU, or the CPU."""
    if device is not None:
        try:
            chosen = torch.device(device)
            torch.empty(0, device=chosen)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise BadInputError(
                f"device: {device!r} cannot be used here ({str(error).splitlines()[0]}); use 'cpu', or None "
                "to choose"
            ) from error
        return chosen
    first = next(module.parameters(), None)
    if first is not None and first.device.type != "cpu":
        return first.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def copied_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors among a callable's arguments are copied, so that a caller may reuse them at once; those with a
    graph are handed on as they are."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) and not value.requires_grad else value
        for key, value in arguments.items()
    }


def sample_request(
    prompt: Any,
    max_tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    stop: Any,
    seed: Any,
    vocab_size: int | None,
    eos_token_ids: tuple[int, ...],
) -> SampleRequest:
    """Check them all. stop None: eos_token_ids. seed None: drawn from torch's generator. BadInputError."""
    tokens = _prompt(prompt, vocab_size)
    check_positive_int("max_tokens", max_tokens)
    if not _is_number(temperature) or temperature < 0:
        raise BadInputError(f"temperature: {temperature!r} must be a number of at least 0; 0 is greedy")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < -1:
        raise BadInputError(f"top_k: {top_k!r} must be a whole number; -1 for all tokens")
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise BadInputError(f"top_p: {top_p!r} must be above 0 and at most 1; 1.0 for all tokens")
    ids, strings = (eos_token_ids, ()) if stop is None else _stops(stop)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise BadInputError(f"seed: {seed!r} must be a whole number, or None")
    chosen = int(torch.randint(2**62, ())) if seed is None else seed
    rest = top_k, float(top_p), ids, strings, chosen
    return SampleRequest(tokens, max_tokens, float(temperature), *rest, ignore_eos=stop is not None)


def within_positions(request: SampleRequest, max_positions: int) -> SampleRequest:
    """The sample ends where the model's positions do. Raises BadInputError if the prompt takes them all."""
    room = max_positions - len(request.prompt)
    if room < 1:
        raise BadInputError(
            f"prompt: {len(request.prompt)} tokens leave no room in the model's {max_positions} positions; "
            "shorten it"
        )
    return replace(request, max_tokens=min(request.max_tokens, room))


def _prompt(prompt: Any, vocab_size: int | None) -> tuple[int, ...]:
    if isinstance(prompt, str):
        raise BadInputError(
            f"prompt: {prompt[:40]!r} is text; give token ids, such as tokenizer(text)['input_ids']"
        )
    ids = as_tensor("prompt", prompt)
    if ids.dim() == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.dim() != 1 or len(ids) == 0:
        raise BadInputError(
            f"prompt: shape {tuple(ids.shape)}; give the ids of one prompt of at least one token, call "
            "sample once each"
        )
    try:
        return tuple(token_inputs(ids[None], None, None, vocab_size).input_ids[0].tolist())
    except BadInputError as error:
        raise BadInputError(str(error).replace("input_ids", "prompt")) from None


def _stops(stop: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(token ids, strings)."""
    single = isinstance(stop, (int, str)) and not isinstance(stop, bool)
    entries = [stop] if single else list(stop) if isinstance(stop, (list, tuple, set)) else None
    if entries is None or not all(
        isinstance(x, (int, str)) and not isinstance(x, bool) and x != "" for x in entries
    ):
        raise BadInputError(f"stop: {stop!r}; give a list of token ids and strings that are not empty")
    ids = tuple(entry for entry in entries if isinstance(entry, int))
    return ids, tuple(entry for entry in entries if isinstance(entry, str))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
