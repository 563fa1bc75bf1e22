"""The parts of PPO that a loop of one's own may want: a buffer of experience, the adaptive KL coefficient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rl_cluster.algorithms.kl_control import AdaptiveKL
from rl_cluster.checks import check_number, check_whole_number
from rl_cluster.errors import BadInputError


class AdaptiveKLController:
    """β ← β · (1 + clip(KL / target − 1, ±0.2) · n / horizon); Ziegler et al. 2019, section 2.2."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        check_number("AdaptiveKLController.init_kl_coef", init_kl_coef, at_least=0.0)
        check_number("AdaptiveKLController.target", target, above=0.0)
        check_number("AdaptiveKLController.horizon", horizon, above=0.0)
        self._controller = AdaptiveKL(init_kl_coef, target, horizon)

    @property
    def value(self) -> float:
        """β now."""
        return self._controller.coef

    kl_coef = value

    def update(self, current: float, n_steps: int) -> float:
        """current: the KL measured, in nats. n_steps: sequences it was measured over. Returns the new β."""
        check_number("AdaptiveKLController.current", float(current))
        check_whole_number("AdaptiveKLController.n_steps", n_steps)
        return self._controller.update(float(current), n_steps)


class PPOBuffer:
    """Queries, responses and rewards that wait to be trained on; `get` makes the batch for train_step.

    queries, responses: int64 [P] and [R] each. rewards: floats.
    """

    def __init__(self) -> None:
        self._queries: list[torch.Tensor] = []
        self._responses: list[torch.Tensor] = []
        self._rewards: list[float] = []

    def __len__(self) -> int:
        return len(self._rewards)

    def add(self, queries: Sequence[Any], responses: Sequence[Any], rewards: Sequence[Any]) -> None:
        """As many of each. BadInputError for ragged lists and for rewards that are not finite."""
        if not len(queries) == len(responses) == len(rewards):
            raise BadInputError(
                f"PPOBuffer.add: {len(queries)} queries, {len(responses)} responses, {len(rewards)} rewards; "
                "give as many of each."
            )
        values = [float(reward) for reward in rewards]
        for index, value in enumerate(values):
            check_number(f"PPOBuffer.rewards[{index}]", value)
        self._queries += [torch.as_tensor(query, dtype=torch.int64).reshape(-1) for query in queries]
        self._responses += [torch.as_tensor(one, dtype=torch.int64).reshape(-1) for one in responses]
        self._rewards += values

    def get(self) -> dict[str, Any]:
        """Everything so far: {"queries", "responses": lists of tensors, "rewards": float64 [n]}."""
        return self._batch(range(len(self)))

    def mini_batches(self, size: int, seed: int = 0) -> Iterator[dict[str, Any]]:
        """All of it once, shuffled, in parts of at most `size`."""
        check_whole_number("PPOBuffer.mini_batches size", size)
        order = np.random.default_rng(seed).permutation(len(self)).tolist()
        for start in range(0, len(order), size):
            yield self._batch(order[start : start + size])

    def clear(self) -> None:
        self._queries, self._responses, self._rewards = [], [], []

    def _batch(self, rows: Sequence[int]) -> dict[str, Any]:
        return {
            "queries": [self._queries[row] for row in rows],
            "responses": [self._responses[row] for row in rows],
            "rewards": torch.tensor([self._rewards[row] for row in rows], dtype=torch.float64),
        }
