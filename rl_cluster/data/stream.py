"""Prompts in, an endless reproducible sequence of (group id, prompt) out, with a cursor that can be saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np

from rl_cluster.data.randomness import permutation
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt


class PromptStream:
    """Epoch after epoch of the prompts, each in an order of its own drawn from (seed, epoch).

    The group id is the position in the stream: `prompt_at` finds the prompt of any group again, so that
    a group can be issued anew after a failure. Nothing depends on who consumes the stream or when.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise BadInputError("data: there is no prompt to train on. Give at least one usable row.")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._fingerprint = _fingerprint(self._prompts)
        self._order = lru_cache(maxsize=2)(self._make_order)

    @property
    def position(self) -> int:
        """The group id that `take` will give out next."""
        return self._position

    @property
    def epoch(self) -> float:
        """Passes over the prompts given out so far."""
        return self._position / len(self._prompts)

    def take(self) -> tuple[int, Prompt]:
        """The next (group id, prompt)."""
        group_id = self._position
        self._position += 1
        return group_id, self.prompt_at(group_id)

    def prompt_at(self, group_id: int) -> Prompt:
        """The prompt of a group; a pure function of the data, the seed and the id (at least 0)."""
        assert group_id >= 0, "evaluation groups are not in the training stream"
        epoch, index = divmod(group_id, len(self._prompts))
        return self._prompts[int(self._order(epoch)[index])]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain values."""
        return {
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; raises BadInputError if data, seed or order are not the same."""
        for name, own in self.state().items():
            if name == "fingerprint" and state.get(name) == _fingerprint_with_places(self._prompts):
                continue  # of a checkpoint that is older than the fingerprint of the content
            if name in ("num_prompts", "fingerprint") and state.get(name) != own:
                raise BadInputError(
                    f"resume: data.train: the prompt stream (it begins with {self._prompts[0].prompt_id}) "
                    f"is not the checkpoint's: {name}={state.get(name)!r} there, {own!r} here. Resume with "
                    "the data and tokenizer of the first start; a file may lie elsewhere, its rows may not "
                    "change."
                )
            if name != "position" and state.get(name) != own:
                raise BadInputError(
                    f"resume: the checkpoint's prompt stream has {name}={state.get(name)!r}, this run has "
                    f"{own!r}. Resume with the data, tokenizer, run.seed and data.shuffle of the first start."
                )
        self._position = int(state["position"])

    def _make_order(self, epoch: int) -> np.ndarray:
        size = len(self._prompts)
        return permutation(size, "epoch", self._seed, epoch) if self._shuffle else np.arange(size)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Of tokens and other columns in their order, not of the place that they were read from."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(f"{len(prompt.tokens)}\0".encode())
        digest.update(np.asarray(prompt.tokens, dtype="<i4").tobytes())
        digest.update(json.dumps(_plain(prompt.metadata)).encode() + b"\0")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """As JSON, the same in every process; of an object that is no data, only its type."""
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, bytes | date | time | timedelta | Decimal):
        return [type(value).__name__, str(value)]
    return [type(value).__name__]


def _fingerprint_with_places(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id}\0{len(prompt.tokens)}\0".encode())
        digest.update(np.asarray(prompt.tokens, dtype="<i4").tobytes())
    return digest.hexdigest()
