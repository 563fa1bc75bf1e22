"""TRL's loop speaks in tensors: queries, responses, generation_kwargs in; a run's prompts, sampling and
trajectories out, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_cluster.algorithms.advantages import gae
from rl_cluster.algorithms.kl import exact_kl, kl_per_token
from rl_cluster.checks import check_number, check_whole_number
from rl_cluster.data.encode import UnusablePromptError, encode_prompt
from rl_cluster.errors import BadInputError
from rl_cluster.protocols import SampleRow
from rl_cluster.trainers.ppo.checks import Estimator
from rl_cluster.trajectory import Prompt, SamplingSpec, Trajectory, TrajectoryGroup


def token_rows(field: str, rows: Any, vocabulary: int) -> list[list[int]]:
    """rows: token ids as a list of 1-D tensors (or lists), or a 2-D tensor. BadInputError names `field`."""
    if isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__len__") or not len(rows):
        raise BadInputError(f"{field}={rows!r:.60}: give a list of at least one tensor of token ids.")
    return [_token_row(f"{field}[{index}]", row, vocabulary) for index, row in enumerate(rows)]


def _token_row(place: str, row: Any, vocabulary: int) -> list[int]:
    try:
        ids = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError):
        ids = None
    if ids is None or ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool or not len(ids):
        shown = type(row).__name__ if ids is None else f"{ids.dtype} {list(ids.shape)}"
        raise BadInputError(f"{place} is {shown}: must be one row of token ids, at least one.")
    values: list[int] = ids.tolist()
    outside = [token for token in values if not 0 <= token < vocabulary]
    if outside:
        raise BadInputError(f"{place}: token id {outside[0]} is not one of the {vocabulary} there are.")
    return values


def query_prompt(place: str, ids: list[int], tokenizer: Any, limit: int) -> Prompt:
    """limit: tokens."""
    if len(ids) > limit:
        raise BadInputError(
            f"{place}: {len(ids)} tokens, more than the {limit} of PPOConfig.max_prompt_length."
        )
    try:
        text, tokens = encode_prompt(tokenizer, ids)
    except UnusablePromptError as error:
        raise BadInputError(f"{place}: {error}.") from error
    return Prompt(place, tokens, text)


IGNORED = ("pad_token_id", "batch_size", "remove_padding", "min_length", "min_new_tokens", "use_cache")
"""generation_kwargs without effect here; the least lengths only where they ask for none."""


def sampling_of(kwargs: Mapping[str, Any], default: SamplingSpec) -> SamplingSpec:
    """transformers' generation_kwargs as a SamplingSpec. BadInputError for those that could not act."""
    known = ("max_new_tokens", "temperature", "top_p", "top_k", "do_sample", "eos_token_id", "stop_strings")
    for name, value in kwargs.items():
        if name == "num_return_sequences" and value == 1:
            continue
        if name not in (*known, *IGNORED):
            raise BadInputError(
                f"generate: {name}={value!r:.60} is not supported; there are {', '.join(known)}."
            )
        if name.startswith("min_") and value is not None and value > 0:
            raise BadInputError(
                f"generate: {name}={value!r}: a least length is not supported; reward length instead."
            )
    temperature = kwargs.get("temperature", default.temperature)
    check_number("generate: temperature", temperature, at_least=0.0)
    max_new_tokens = kwargs.get("max_new_tokens", default.max_new_tokens)
    check_whole_number("generate: max_new_tokens", max_new_tokens)
    top_p = kwargs.get("top_p", default.top_p)
    check_number("generate: top_p", top_p, above=0.0)
    top_k = int(kwargs.get("top_k") or -1)  # transformers and TRL: 0 is off
    ends = kwargs.get("eos_token_id")
    stop_ids = () if ends is None else tuple(ends) if isinstance(ends, Sequence) else (ends,)
    if any(token < 0 for token in stop_ids):
        raise BadInputError(
            f"generate: eos_token_id={ends!r}: is no token id. A response always ends at the tokenizer's own."
        )
    strings = kwargs.get("stop_strings") or ()
    return SamplingSpec(
        temperature=float(temperature) if kwargs.get("do_sample", True) else 0.0,
        max_new_tokens=max_new_tokens,
        top_p=min(float(top_p), 1.0),
        top_k=top_k,
        stop=(strings,) if isinstance(strings, str) else tuple(strings) or default.stop,
        stop_token_ids=(*default.stop_token_ids, *stop_ids),
    )


def response_ids(group: TrajectoryGroup) -> torch.Tensor:
    """int64 [R]: what the policy drew, the end token included; the first sample's."""
    trajectory = group.trajectories[0]
    return torch.from_numpy(trajectory.tokens[len(group.prompt.tokens) :].astype(np.int64))


def prompt_ids(group: TrajectoryGroup) -> torch.Tensor:
    """int64 [P]."""
    return torch.from_numpy(group.prompt.tokens.astype(np.int64))


def brought_group(
    group_id: int,
    prompt: Prompt,
    response: Sequence[int],
    version: int,
    tokenizer: Any,
    end_ids: frozenset[int],
    stop: Sequence[str] = (),
) -> TrajectoryGroup:
    """A response of the caller's as a group of one. With what probability it was drawn nobody knows: NaN.

    version: of the weights of now. end_ids, stop: what ends a response, the stop strings anywhere in it.
    """
    start = len(prompt.tokens)
    tokens = np.concatenate([prompt.tokens, np.asarray(response)]).astype(np.int32)
    drawn = np.arange(len(tokens)) >= start
    text = tokenizer.decode(list(response), skip_special_tokens=False) if stop else ""
    ended = response[-1] in end_ids or any(string in text for string in stop)
    trajectory = Trajectory(
        tokens=tokens,
        action_mask=drawn,
        behaviour_logprobs=np.where(drawn, np.nan, 0.0).astype(np.float32),
        policy_versions=np.where(drawn, version, -1).astype(np.int32),
        finish_reason="stop" if ended else "length",
        response_text=tokenizer.decode(list(response), skip_special_tokens=True),
        ended_with_eos=ended,
    )
    return TrajectoryGroup(group_id, prompt, (trajectory,))


def score_column(scores: Any, expected: int) -> list[float]:
    """scores: a tensor [n], or a list of numbers or of tensors of one. BadInputError for any other."""
    if isinstance(scores, str | bytes | Mapping) or not hasattr(scores, "__len__"):
        raise BadInputError(f"scores={scores!r:.60}: give a list of {expected} numbers, or a tensor of them.")
    if len(scores) != expected:
        raise BadInputError(f"scores: {len(scores)} for {expected} responses; give one each.")
    values = []
    for index, score in enumerate(scores):
        single = torch.as_tensor(score).numel() == 1 if not isinstance(score, str) else False
        value = float(score) if single else float("nan")
        if not np.isfinite(value):
            raise BadInputError(f"scores[{index}]={score!r:.60}: must be one finite number.")
        values.append(value)
    return values


def padded(rows: Sequence[torch.Tensor], pad: int) -> torch.Tensor:
    """int64 [N, L], padded on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad)


def sample_rows(batch: Mapping[str, Any], rewards: Any, columns: Sequence[str]) -> list[SampleRow]:
    """columns: the batch's, of queries and of responses. BadInputError where one is missing."""
    query, response = ([*columns, "", ""])[:2]
    missing = [name for name in (query, response) if name not in batch]
    if missing:
        raise BadInputError(f"log_stats: batch has no column {missing[0]!r}, only {sorted(batch)}.")
    values = score_column(rewards, len(batch[response]))
    return [
        SampleRow(str(q), str(r), value)
        for q, r, value in zip(batch[query], batch[response], values, strict=True)
    ]


def advantages_of(
    rewards: Any, values: Any, dones: Any, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As PPOTrainer.compute_advantages."""
    columns = [torch.as_tensor(column).detach().cpu() for column in (rewards, values)]
    ends = None if dones is None else torch.as_tensor(dones).detach().cpu().bool()
    shapes = {tuple(column.shape) for column in (*columns, *([] if ends is None else [ends]))}
    if len(shapes) > 1 or columns[0].ndim not in (1, 2):
        raise BadInputError(f"compute_advantages: shapes {sorted(shapes)}: give [T] or [N, T], all the same.")
    rewards_NL, values_NL = (np.atleast_2d(column.double().numpy()) for column in columns)
    dones_NL = None if ends is None else np.atleast_2d(ends.numpy())
    results = gae(rewards_NL, values_NL, gamma, lam, dones_NL)
    advantages, returns = (torch.from_numpy(one).float().reshape(columns[0].shape) for one in results)
    return advantages, returns


def kl_estimates(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Per token, as PPOTrainer.compute_kl_penalty without the coefficient."""
    if logprobs.shape != ref_logprobs.shape:
        raise BadInputError(
            f"compute_kl_penalty: shapes {list(logprobs.shape)} and {list(ref_logprobs.shape)} differ."
        )
    if estimator == "exact":
        return exact_kl(logprobs, ref_logprobs)
    return kl_per_token(logprobs, ref_logprobs, estimator)
