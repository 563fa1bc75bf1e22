"""What an episode is written down in, and the seams that it is played through."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rl_cluster.trajectory import FinishReason, SamplingSpec, Trajectory


class Drawn(Protocol):
    """What a generator returns: arrays of n tokens, as actors.engine.Sample."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray: ...
    @property
    def versions(self) -> np.ndarray: ...
    @property
    def finish_reason(self) -> FinishReason: ...


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
    """The tokens of a running episode, with who made them; four aligned lists.

    ended: whether a stop string ended the last response."""

    tokens: list[int]
    actions: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: bool = False

    def observe(self, tokens: Sequence[int]) -> None:
        """Tokens that the policy did not draw."""
        self.tokens.extend(tokens)
        self.actions.extend([False] * len(tokens))
        self.logprobs.extend([0.0] * len(tokens))
        self.versions.extend([-1] * len(tokens))

    def act(self, drawn: Drawn, taken: int | None = None, has_stops: bool = False) -> None:
        """Tokens that the policy drew; the first `taken` of them, where the others came after the end.

        has_stops: a response that stopped without an end token was ended by a stop string.
        """
        kept = slice(taken)
        self.tokens.extend(drawn.tokens[kept].tolist())
        self.actions.extend([True] * len(drawn.tokens[kept]))
        self.logprobs.extend(drawn.logprobs[kept].tolist())
        self.versions.extend(drawn.versions[kept].tolist())
        whole = len(drawn.tokens[kept]) == len(drawn.tokens)
        self.ended = has_stops and whole and drawn.finish_reason == "stop"

    def trajectory(
        self,
        decoder: Decoder,
        prompt_length: int,
        eos_token_ids: frozenset[int],
        finish_reason: FinishReason,
        reward: float | None = None,
        components: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """eos_token_ids: drawing one of them last is to have ended by itself, too."""
        return Trajectory(
            tokens=np.asarray(self.tokens, dtype=np.int32),
            action_mask=np.asarray(self.actions, dtype=np.bool_),
            behaviour_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            policy_versions=np.asarray(self.versions, dtype=np.int32),
            finish_reason=finish_reason,
            response_text=decoder.decode(self.tokens[prompt_length:], skip_special_tokens=True),
            ended_with_eos=self.actions[-1] and (self.ended or self.tokens[-1] in eos_token_ids),
            reward=reward,
            components=dict(components or {}),
        )
