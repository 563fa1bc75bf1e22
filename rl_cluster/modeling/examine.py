"""A model that was just loaded goes in; how its sequences have to run, proved by its own plain forward pass.

A few short sequences go through transformers one at a time, with the model's own eager attention: those are
the right numbers. Packed, they have to come out the same; where they do not, padded; else the model is
refused by name. Legend: T tokens of all sequences, V vocabulary, D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rl_cluster.errors import BadInputError
from rl_cluster.modeling.continuing import continued_states
from rl_cluster.modeling.full_precision import in_full_precision
from rl_cluster.modeling.layout import PackedLayout
from rl_cluster.modeling.logit_map import IDENTITY, LogitMap
from rl_cluster.modeling.mask_pattern import NotPackableError
from rl_cluster.modeling.own_attention import mixes_tokens, set_attention
from rl_cluster.modeling.packed import (
    ATTENTION,
    CHECKED_ATTENTION,
    decoder_of,
    packed_hidden_states,
)
from rl_cluster.modeling.token_logprobs import token_logprobs

logger = logging.getLogger(__name__)

Way = Literal["packed", "padded"]
"""Packed: sequences end to end. Padded: as rows of a batch, with the model's own attention."""

LENGTHS, SHARED = (9, 6, 12), 4
"""Of the sequences; the third begins with the first SHARED tokens of the first."""

ALLOWED, ALLOWED_IN_HALF = 1e-3, 0.1
"""Nats (of hidden states: parts of their root mean square): the largest difference in full precision, the
mean one in half precision, where a single number may be rounded far."""

ROUNDING_IN_HALF, TIMES_ROUNDING = 0.03, 4
"""In half precision packing may differ by so much, or so many times what padding alone makes differ."""

MODEL_ERRORS = (
    *(RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError, NameError),
    NotPackableError,
)
"""What a model's own code may raise where it is run in another way than it was written for."""

FROM_THE_FUTURE = 1e-4, 0.1
"""In full and in half precision: how far, in parts of the numbers' size, later tokens may move a state."""


@dataclass(frozen=True)
class Examined:
    """way: how the model runs from now on. difference: from plain transformers, as ALLOWED. why_padded: what
    kept it from being packed. logit_map: what it does to its logits; of a trunk, nothing."""

    way: Way
    difference: float
    why_padded: str = ""
    logit_map: LogitMap = IDENTITY


@dataclass(frozen=True)
class _Probe:
    """tokens: int64 [T], of three sequences, the third leaning on the first. targets: the places of all that
    are predicted. compared: hidden states [T, D] → the numbers that have to be `expected`.
    generates: keys and values of the first tokens will be kept, for others that come after."""

    decoder: nn.Module
    tokens: torch.Tensor
    expected: torch.Tensor
    compared: Callable[[torch.Tensor], torch.Tensor]
    generates: bool = False

    @torch.no_grad()
    def difference(self) -> float:
        """Of the numbers as the decoder gives them now."""
        layout = PackedLayout.of(LENGTHS, self.tokens.device, [(0, 0), (1, 0), (0, SHARED)])
        hidden = packed_hidden_states(self.decoder, self.tokens, layout)
        everywhere = torch.arange(len(self.tokens), device=self.tokens.device)
        found = self.compared(layout.states_at(hidden, everywhere))
        gaps = (found.float() - self.expected).abs()
        # A comparison that NaN fails: what is not a number is not equal.
        return float(gaps.max() if _is_full(hidden) else gaps.mean())

    @torch.no_grad()
    def show_masks(self) -> None:
        """Run one sequence through CHECKED_ATTENTION; NotPackableError where a layer wants another mask."""
        layout = PackedLayout.of(LENGTHS[:1], self.tokens.device)
        packed_hidden_states(self.decoder, self.tokens[: LENGTHS[0]], layout)

    @torch.no_grad()
    def continued_difference(self) -> float:
        """The largest, of the first sequence's states where its last tokens come one at a time, in parts of
        the states' size."""
        tokens, device = self.tokens[: LENGTHS[0]], self.tokens.device
        whole = packed_hidden_states(self.decoder, tokens, PackedLayout.of(LENGTHS[:1], device))
        states = continued_states(self.decoder, tokens, SHARED)
        size = whole.float().square().mean().sqrt().clamp_min(1e-6)
        return float((states - whole[SHARED:]).float().abs().max() / size)

    @property
    def is_full(self) -> bool:
        return _is_full(next(self.decoder.parameters()))

    @property
    def allowed(self) -> float:
        return ALLOWED if self.is_full else ALLOWED_IN_HALF


def examine_policy(lm: PreTrainedModel, where: str) -> Examined:
    """By log-probabilities. Sets lm's attention. where: names the model at the beginning of a message.

    Raises BadInputError for a model that is not causal, and for one that cannot be run rightly.
    """
    reason = _reason_in_full(lm, decoder_of(lm), lambda: _probe_of_policy(lm, where), where)
    way, difference, why = _find_way(lm, _probe_of_policy(lm, where), where, reason)
    return Examined(way, difference, why, LogitMap.of(lm.config))


def _probe_of_policy(lm: PreTrainedModel, where: str) -> _Probe:
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise BadInputError(f"{where} has no linear language-model head; choose another model")
    tokens = _tokens(lm)
    plain = _plainly(lambda row: lm(input_ids=row, use_cache=False).logits[0], lm, tokens, where)
    predicted = torch.cat([table[:-1].log_softmax(-1) for table in plain])
    starts = np.cumsum((0, *LENGTHS[:-1]))
    places = np.concatenate([np.arange(s + 1, s + n) for s, n in zip(starts, LENGTHS, strict=True)])
    targets = torch.from_numpy(places).to(tokens.device)
    logit_map = LogitMap.of(lm.config)

    def logprobs(hidden: torch.Tensor) -> torch.Tensor:
        states = hidden[targets - 1]
        return token_logprobs(states, head.weight, head.bias, tokens[targets], 1.0, logit_map=logit_map)[0]

    expected = predicted.gather(-1, tokens[targets, None])[:, 0]
    return _Probe(decoder_of(lm), tokens, expected, logprobs, generates=True)


def examine_trunk(lm: PreTrainedModel, trunk: nn.Module, where: str) -> Examined:
    """By hidden states of the trunk, which is lm itself or a part of it; else as examine_policy."""
    reason = _reason_in_full(lm, trunk, lambda: _probe_of_trunk(lm, trunk, where), where)
    return Examined(*_find_way(lm, _probe_of_trunk(lm, trunk, where), where, reason))


def _probe_of_trunk(lm: PreTrainedModel, trunk: nn.Module, where: str) -> _Probe:
    tokens = _tokens(lm)
    plain = _plainly(
        lambda row: trunk(input_ids=row, use_cache=False).last_hidden_state[0], lm, tokens, where
    )
    expected = torch.cat(plain)
    size = expected.square().mean().sqrt().clamp_min(1e-6)
    return _Probe(trunk, tokens, expected / size, lambda hidden: hidden.float() / size)


def _reason_in_full(
    lm: PreTrainedModel, decoder: nn.Module, make_probe: Callable[[], _Probe], where: str
) -> str:
    """What keeps a model in half precision from being packed by its first layers in float32, where rounding
    hides nothing; nothing of a model in float32, and where that cannot be tried."""
    with in_full_precision(lm, decoder) as possible:
        if not possible:
            return ""
        try:
            probe = make_probe()
        except BadInputError as error:
            if error.__cause__ is None:
                raise
            return ""  # it does not run so; whether it runs as it is will show
        return _find_way(lm, probe, where, told=False)[2]


def _tokens(lm: PreTrainedModel) -> torch.Tensor:
    """int64 [T], drawn from the vocabulary's beginning without what the config names (padding, images)."""
    text = lm.config.get_text_config(decoder=True)
    named = {v for v in (*vars(lm.config).values(), *vars(text).values()) if isinstance(v, int)}
    size = min(lm.get_input_embeddings().num_embeddings, 4096)
    choice = np.array([token for token in range(size) if token not in named] or range(size))
    tokens = np.random.default_rng(0).choice(choice, sum(LENGTHS))
    third = LENGTHS[0] + LENGTHS[1]
    tokens[third : third + SHARED] = tokens[:SHARED]
    return torch.from_numpy(tokens).to(lm.device)


@torch.no_grad()
def _plainly(
    run: Callable[[torch.Tensor], torch.Tensor], lm: PreTrainedModel, tokens: torch.Tensor, where: str
) -> list[torch.Tensor]:
    """float32 [length, …] of each sequence, by transformers alone."""
    set_attention(lm, "eager")
    try:
        numbers = [run(row[None]).float() for row in tokens.split(LENGTHS)]
    except MODEL_ERRORS as error:
        raise BadInputError(
            f"{where} does not run on plain tokens: {_named(error)}; choose another"
        ) from error
    first, third = numbers[0][:SHARED], numbers[2][:SHARED]
    limit = FROM_THE_FUTURE[0 if _is_full(next(lm.parameters())) else 1]
    if float((first - third).abs().max()) > limit * float(first.square().mean().sqrt()):
        raise BadInputError(
            f"{where} is not causal: the tokens after a place change what it says there. Give a decoder "
            "(config.json with is_decoder, or another architecture), not an encoder."
        )
    return numbers


def _find_way(
    lm: PreTrainedModel, probe: _Probe, where: str, reason: str = "", told: bool = True
) -> tuple[Way, float, str]:
    """(way, difference, why not packed); lm's attention is set accordingly. reason: known against packing."""
    allowed = probe.allowed
    if not probe.is_full:
        _, rounding = _padded(lm, probe, where)
        allowed = min(allowed, max(ROUNDING_IN_HALF, TIMES_ROUNDING * rounding))
    if not reason:
        found, reason = _packed(lm, probe, allowed)
        if not reason:
            return "packed", found, ""
    agrees, found = _padded(lm, probe, where)
    if not agrees:
        raise BadInputError(
            f"{where} does not give here what it gives in plain transformers: {found:.2g} apart, "
            f"at most {probe.allowed:g} is allowed (packed: {reason}). Choose another model."
        )
    level = logging.WARNING if told else logging.DEBUG
    logger.log(
        level,
        "%s is not packed (%s): its sequences run as padded rows with the model's own attention; the same "
        "numbers, but slower.",
        where,
        reason,
    )
    return "padded", found, reason


def _padded(lm: PreTrainedModel, probe: _Probe, where: str) -> tuple[bool, float]:
    """(whether it agrees with plain transformers, difference), by the fastest attention of its own."""
    # PyTorch's fused attention takes less memory, but drops the soft-capping that some models ask it for.
    capped = getattr(lm.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    found = float("nan")
    try:
        for name in ("eager",) if capped else ("sdpa", "eager"):
            if set_attention(lm, name):
                found = probe.difference()
                if found <= probe.allowed:
                    return True, found
    except MODEL_ERRORS as error:
        raise BadInputError(
            f"{where} has more between its decoder and its logits than a linear head: {_named(error)}. "
            "Choose another model."
        ) from error
    return False, found


def _packed(lm: PreTrainedModel, probe: _Probe, allowed: float) -> tuple[float, str]:
    """(difference, what keeps it from being packed or nothing)."""
    reason = mixes_tokens(lm, probe.decoder)
    if reason:
        return float("nan"), reason
    try:
        if not set_attention(lm, CHECKED_ATTENTION):
            return float("nan"), "its attention cannot be replaced"
        probe.show_masks()
        set_attention(lm, ATTENTION)
        found = probe.difference()
        continued = probe.continued_difference() if probe.generates and probe.is_full else 0.0
    except MODEL_ERRORS as error:
        return float("nan"), str(error) if isinstance(error, NotPackableError) else _named(error)
    if not continued <= ALLOWED:
        return found, f"kept keys and values do not continue a sequence: {continued:.2g} apart"
    if found <= allowed:
        return found, ""
    return found, f"packed sequences mix: {found:.2g} apart from single ones"


def _is_full(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float64)


def _named(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
