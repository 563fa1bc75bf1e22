"""An episode: a prompt and a seed in, a Trajectory out, by turns of generation.

Today an episode has one turn. An environment that answers takes its place in `play`: its tokens go into
the trajectory with action False, and the next turn generates from all tokens so far (tokens in, tokens out:
nothing is ever tokenised again), with the seed of that turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rl_cluster.trajectory import FinishReason, Prompt, SamplingSpec, Trajectory


class Drawn(Protocol):
    """What a generator returns: arrays of n tokens, as actors.engine.Sample."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason


class Generator(Protocol):
    async def generate(self, prompt: Sequence[int], seed: int, sampling: SamplingSpec) -> Drawn: ...


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


def turn_seed(seed: int, turn: int) -> int:
    """Of a turn of an episode; the first turn uses the episode's own seed."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass
class Transcript:
    """The tokens of a running episode, with who made them; four aligned lists."""

    tokens: list[int]
    actions: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tokens that the policy did not draw."""
        self.tokens.extend(tokens)
        self._annotate(len(tokens))

    def _annotate(self, num_tokens: int) -> None:
        self.actions.extend([False] * num_tokens)
        self.logprobs.extend([0.0] * num_tokens)
        self.versions.extend([-1] * num_tokens)

    def act(self, drawn: Drawn) -> None:
        """Tokens that the policy drew."""
        self.tokens.extend(drawn.tokens.tolist())
        self.actions.extend([True] * len(drawn.tokens))
        self.logprobs.extend(drawn.logprobs.tolist())
        self.versions.extend(drawn.versions.tolist())


async def play(
    generator: Generator,
    decoder: Decoder,
    eos_token_ids: frozenset[int],
    prompt: Prompt,
    seed: int,
    sampling: SamplingSpec,
) -> Trajectory:
    """One episode of one turn. eos_token_ids: drawing one of them last is to have ended by itself."""
    transcript = Transcript(tokens=[])
    transcript.observe(prompt.tokens.tolist())
    drawn = await generator.generate(transcript.tokens, turn_seed(seed, turn=0), sampling)
    transcript.act(drawn)
    response = drawn.tokens.tolist()
    return Trajectory(
        tokens=np.asarray(transcript.tokens, dtype=np.int32),
        action_mask=np.asarray(transcript.actions, dtype=np.bool_),
        behaviour_logprobs=np.asarray(transcript.logprobs, dtype=np.float32),
        policy_versions=np.asarray(transcript.versions, dtype=np.int32),
        finish_reason=drawn.finish_reason,
        response_text=decoder.decode(response, skip_special_tokens=True),
        ended_with_eos=bool(response) and response[-1] in eos_token_ids,
    )
