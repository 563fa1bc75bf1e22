"""An action as a caller gives it in, checked token ids out; prompts and limits checked likewise."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from rl_cluster.data.encode import encode_text
from rl_cluster.errors import BadInputError


def token_ids(action: Any, tokenizer: Any) -> list[int]:
    """The token ids of an action (see Action); BadInputError for none, for other types, for unknown ids."""
    if isinstance(action, torch.Tensor):
        ids = _ids_of_tensor(action)
    elif isinstance(action, int) and not isinstance(action, bool):
        ids = [action]
    elif isinstance(action, Sequence) and all(type(token) is int for token in action):
        ids = list(action)
    else:
        raise BadInputError(
            f"action is {type(action).__name__} {action!r:.60}: a token id, a tensor of token ids or a list "
            "of them is needed."
        )
    if not ids:
        raise BadInputError("action is empty: a step needs at least one token.")
    vocabulary = len(tokenizer)
    for token in ids:
        if not 0 <= token < vocabulary:
            raise BadInputError(
                f"action contains token {token}, but the tokenizer has {vocabulary} (0 to {vocabulary - 1})."
            )
    return ids


def _ids_of_tensor(action: torch.Tensor) -> list[int]:
    if action.is_floating_point() or action.is_complex() or action.dtype == torch.bool:
        raise BadInputError(f"action has dtype {action.dtype}: token ids are integers.")
    if action.dim() > 1 and action.numel() != action.shape[-1]:
        raise BadInputError(
            f"action has shape {tuple(action.shape)}: an environment plays one episode: give one row."
        )
    return [int(token) for token in action.reshape(-1).tolist()]


def check_prompts(prompts: Any, tokenizer: Any) -> list[str]:
    """The prompts as a list; BadInputError for none, or for one that is no text, empty or too long."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise BadInputError(f"prompts is {type(prompts).__name__} {prompts!r:.60}: must be a list of texts.")
    if not prompts:
        raise BadInputError("prompts is empty: give at least one prompt.")
    # What a tokenizer without a limit of its own claims (1e30) limits nothing.
    limit = getattr(tokenizer, "model_max_length", math.inf)
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():
            raise BadInputError(f"prompts[{number}]={prompt!r:.60}: must be a text that is not empty.")
        length = len(encode_text(tokenizer, prompt))
        if length == 0:
            raise BadInputError(f"prompts[{number}]={prompt!r:.60}: the tokenizer makes no tokens of it.")
        if length >= limit:
            raise BadInputError(
                f"prompts[{number}]={prompt!r:.60} has {length} tokens, the model takes {limit}, response "
                "included. Shorten the prompt."
            )
    return list(prompts)


def check_max_length(max_length: Any) -> int:
    if not isinstance(max_length, int) or isinstance(max_length, bool) or max_length < 1:
        raise BadInputError(f"max_length={max_length!r}: must be a whole number of tokens, at least 1.")
    return max_length


def check_end_tokens(end_token_ids: Any, tokenizer: Any) -> frozenset[int]:
    """What ends a response: the tokens given, and the tokenizer's own. BadInputError for what is none."""
    given = [] if end_token_ids is None else end_token_ids
    given = [given] if isinstance(given, int) else given
    if not isinstance(given, Collection) or not all(type(token) is int for token in given):
        raise BadInputError(
            f"end_token_ids={end_token_ids!r:.60}: must be token ids, such as model.generation_config."
            "eos_token_id."
        )
    own = tokenizer.eos_token_id
    return frozenset(given).union(() if own is None else (own,))


def cut_at_end(ids: Sequence[int], ends: Collection[int], max_length: int) -> tuple[list[int], bool]:
    """The tokens up to and with the first of `ends`, at most max_length; and whether they end with one."""
    kept = list(ids[:max_length])
    for place, token in enumerate(kept):
        if token in ends:
            return kept[: place + 1], True
    return kept, False
