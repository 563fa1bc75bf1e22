"""Prompts with seeds go in, responses drawn by the policy itself come out, a token of each at a time.

The policy is the learner's own module: no second copy of the weights, and the same linear layers, rotary
positions and head that training uses. Prompts run packed, without padding; then each step feeds one token per
unfinished sequence, whose keys and values are kept. A model that is not packed (packed.is_packed) has more to
keep than those: its sequences run whole at every step. Legend: N sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rl_cluster.modeling.drawing import draw, sample_noise
from rl_cluster.modeling.kv_cache import Decoding, KeyValueCache
from rl_cluster.modeling.layout import PackedLayout
from rl_cluster.modeling.packed import (
    Prefill,
    check_rope,
    decoder_of,
    is_packed,
    packed_hidden_states,
    run_decoder,
)
from rl_cluster.modeling.policy import PolicyModel, base_model
from rl_cluster.trajectory import FinishReason

TOKENS_PER_PASS = 8192
"""Of prompts; a longer one goes alone."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Request:
    """One response to be drawn. It ends after a token of stop_token_ids (kept), after the token that
    completes a stop string (kept), or at max_new_tokens, which is at least 1."""

    prompt: Sequence[int]
    seed: int
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawing:
    """What the requests of one batch have in common; see drawing.draw."""

    temperature: float
    top_k: int = -1
    top_p: float = 1.0


@dataclass
class _Response:
    request: Request
    noise: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Generation:
    """N requests under way. Call `step` until it returns False; between two steps anything may happen, also
    to the weights. Switches the policy to evaluation for each step; who trains it switches it back."""

    def __init__(
        self, policy: PolicyModel, requests: Sequence[Request], drawing: Drawing, decode: Decode | None = None
    ) -> None:
        """decode: token ids to text, needed where a request has stop strings."""
        assert all(len(request.prompt) > 0 and request.max_new_tokens > 0 for request in requests)
        self.responses = [_Response(r, sample_noise(r.seed, r.max_new_tokens)) for r in requests]
        self._policy = policy
        self._decoder = decoder_of(base_model(policy.lm))
        self._drawing = drawing
        self._decode = decode
        self._device = policy.logprob_head.weight.device
        capacity = max(len(r.prompt) + r.max_new_tokens for r in requests)
        check_rope(self._decoder, capacity)
        self._cache = KeyValueCache(len(requests), capacity, self._device)
        self._has_cache = is_packed(self._decoder)
        self._in_cache = list(self.responses)
        self._last: torch.Tensor | None = None
        self._noise = self._pad_noise()
        self._num_steps = 0

    @torch.no_grad()
    def step(self, version: int = 0) -> bool:
        """Draw a token for every unfinished sequence; whether any is left. version: noted with the tokens."""
        if self._policy.training:
            self._policy.eval()
        hidden = self._next_states()
        tokens, logprobs = draw(
            self._policy.logprob_head.next_token(hidden).logits(slice(None), 1.0),
            self._noise[self._num_steps],
            self._drawing.temperature,
            self._drawing.top_k,
            self._drawing.top_p,
        )
        self._num_steps += 1
        self._last = tokens
        for response, token, logprob in zip(self._in_cache, tokens.tolist(), logprobs.tolist(), strict=True):
            if response.finish_reason is None:
                response.tokens.append(token)
                response.logprobs.append(logprob)
                response.versions.append(version)
                response.finish_reason = self._finish_reason(response)
        return self._drop_finished()

    def _next_states(self) -> torch.Tensor:
        """The states [N, D] that the next tokens are drawn from."""
        if not self._has_cache:
            return self._run_whole()
        return self._run_prompts() if self._last is None else self._run_last(self._last)

    def _run_whole(self) -> torch.Tensor:
        """The states [N, D] after all tokens so far, computed anew; each distinct sequence once."""
        rows: dict[tuple[int, ...], int] = {}
        numbers = [
            rows.setdefault((*response.request.prompt, *response.tokens), len(rows))
            for response in self._in_cache
        ]
        states = []
        for sequences in _passes(list(rows)):
            lengths = [len(sequence) for sequence in sequences]
            tokens = self._tensor(np.concatenate([np.asarray(s, dtype=np.int64) for s in sequences]))
            hidden = packed_hidden_states(self._decoder, tokens, PackedLayout.of(lengths, self._device))
            states.append(hidden[self._tensor(np.cumsum(lengths) - 1)])
        return torch.cat(states)[self._tensor(np.array(numbers))]

    def _run_prompts(self) -> torch.Tensor:
        """The states [N, D] after each sequence's prompt; a prompt that several share is computed once."""
        followers: dict[tuple[int, ...], list[int]] = {}
        for row, response in enumerate(self.responses):
            followers.setdefault(tuple(response.request.prompt), []).append(row)
        states: torch.Tensor | None = None
        for prompts in _passes(list(followers)):
            hidden = self._run_pass(prompts, [followers[prompt] for prompt in prompts])
            for prompt, state in zip(prompts, hidden, strict=True):
                if states is None:
                    states = state.new_empty(len(self.responses), len(state))
                states[followers[prompt]] = state
                self._cache.lengths[followers[prompt]] = len(prompt)
        assert states is not None
        return states

    def _run_pass(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[list[int]]) -> torch.Tensor:
        """The state after each prompt, [P, D]; its keys and values go to each of its rows."""
        lengths = [len(prompt) for prompt in prompts]
        ends = np.cumsum(lengths)
        copies, in_cache, places = [], [], []
        for end, length, followers in zip(ends, lengths, rows, strict=True):
            for row in followers:
                copies.append(np.arange(end - length, end))
                in_cache.append(np.full(length, row))
                places.append(np.arange(length))
        packed = PackedLayout.of(lengths, self._device)
        prefill = Prefill(
            packed, self._cache, *(self._tensor(np.concatenate(x)) for x in (copies, in_cache, places))
        )
        tokens = self._tensor(np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts]))
        hidden = run_decoder(self._decoder, tokens, packed.position_ids, prefill)
        return hidden[self._tensor(ends - 1)]

    def _run_last(self, tokens: torch.Tensor) -> torch.Tensor:
        """The states [N, D] after the tokens [N] drawn last."""
        step = Decoding.of(self._cache)
        hidden = run_decoder(self._decoder, tokens, step.places[None], step)
        self._cache.advance()
        return hidden

    def _finish_reason(self, response: _Response) -> FinishReason | None:
        request = response.request
        if response.tokens[-1] in request.stop_token_ids:
            return "stop"
        if request.stop:
            assert self._decode is not None, "stop strings need a tokenizer"
            text = self._decode(response.tokens)
            if any(stop in text for stop in request.stop):
                return "stop"
        return "length" if len(response.tokens) == request.max_new_tokens else None

    def _drop_finished(self) -> bool:
        """Finished sequences are carried along until they are half of the batch."""
        open_rows = [row for row, r in enumerate(self._in_cache) if r.finish_reason is None]
        if not open_rows:
            return False
        if 2 * len(open_rows) <= len(self._in_cache):
            rows = self._tensor(np.array(open_rows))
            self._in_cache = [self._in_cache[row] for row in open_rows]
            self._cache.keep(rows)
            self._noise = self._noise[:, rows]
            assert self._last is not None
            self._last = self._last[rows]
        return True

    def _pad_noise(self) -> torch.Tensor:
        """float64 [most tokens, N], 0 past a sequence's end."""
        columns = np.zeros((max(len(r.noise) for r in self.responses), len(self.responses)))
        for row, response in enumerate(self.responses):
            columns[: len(response.noise), row] = response.noise
        return torch.from_numpy(columns).to(self._device)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _passes(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Prompts in order, as many per pass as TOKENS_PER_PASS allows."""
    passes: list[list[tuple[int, ...]]] = []
    used = 0
    for prompt in prompts:
        if not passes or used + len(prompt) > TOKENS_PER_PASS:
            passes.append([])
            used = 0
        passes[-1].append(prompt)
        used += len(prompt)
    return passes
