"""Some rows of a TokenBatch become the tensors of one packed forward pass and the constants of its loss.

Legend: T packed tokens, A drawn tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_cluster.algorithms.inputs import LossInputs
from rl_cluster.batch import TokenBatch
from rl_cluster.modeling.layout import PackedLayout
from rl_cluster.modeling.sharing import shared_prefixes

LOSS_COLUMNS = {
    "policy_versions": "policy_versions",
    "behaviour_logprobs": "behaviour_logprobs",
    "proximal_logprobs": "proximal_logprobs",
    "reference_logprobs": "reference_logprobs",
    "values": "old_values",
    "advantages": "advantages",
    "returns": "returns",
    "labels": "labels",
    "margins": "margins",
}
"""TokenBatch's column -> LossInputs' field."""


@dataclass(frozen=True)
class MicroBatch:
    """tokens: int64 [T]. targets: int64 [A], the drawn tokens' places among them. row: int64 [A].
    places: int64 [A] numpy, the drawn tokens' places in the whole TokenBatch. target_ids: int64 [A] or [A, K]
    where they are not the drawn tokens, and target_weights float32 [A, K]; see TokenBatch."""

    tokens: torch.Tensor
    packed: PackedLayout
    targets: torch.Tensor
    row: torch.Tensor
    num_rows: int
    places: np.ndarray
    target_ids: torch.Tensor | None = None
    target_weights: torch.Tensor | None = None

    @property
    def ids(self) -> torch.Tensor:
        """int64 [A] or [A, K]."""
        return self.tokens[self.targets] if self.target_ids is None else self.target_ids

    def of_actions(self, logprobs: torch.Tensor) -> torch.Tensor:
        """[A], of [A] or [A, K]."""
        if self.target_weights is None:
            return logprobs
        there = self.target_weights != 0
        return (torch.where(there, logprobs, 0.0) * self.target_weights).sum(-1)

    @staticmethod
    def of(batch: TokenBatch, rows: Sequence[int], device: torch.device) -> MicroBatch:
        """rows empty: a dummy sequence of one token without drawn ones, whose loss and gradient are 0."""
        if not rows:
            nothing = torch.zeros(0, dtype=torch.int64, device=device)
            token = torch.zeros(1, dtype=torch.int64, device=device)
            return MicroBatch(token, PackedLayout.of([1], device), nothing, nothing, 0, np.zeros(0, np.int64))
        offsets = batch.offsets
        lengths = [int(batch.lengths[row]) for row in rows]
        index = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])
        tokens, mask = batch.tokens[index], batch.action_mask[index]
        targets = np.flatnonzero(mask)
        ids, id_weights = batch.target_ids, batch.target_weights
        row_of_token = np.repeat(np.arange(len(rows)), lengths)
        return MicroBatch(
            tokens=_tensor(tokens.astype(np.int64), device),
            packed=PackedLayout.of(lengths, device, shared_prefixes(tokens, lengths)),
            targets=_tensor(targets, device),
            row=_tensor(row_of_token[targets], device),
            num_rows=len(rows),
            places=index[targets],
            target_ids=None if ids is None else _tensor(ids[index[targets]].astype(np.int64), device),
            target_weights=None if id_weights is None else _floats(id_weights[index[targets]], device),
        )

    def loss_inputs(
        self,
        batch: TokenBatch,
        row_weights: np.ndarray,
        output: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> LossInputs:
        """row_weights: float64 [N], per row of the whole batch; the batch's own `weights` take precedence."""
        device = self.tokens.device
        if batch.weights is None:
            weights = row_weights[batch.row_of_token[self.places]]
        else:
            weights = batch.weights[self.places]
        constants = {}
        for column, name in LOSS_COLUMNS.items():
            numbers = getattr(batch, column)
            constants[name] = None if numbers is None else _floats(numbers[self.places], device)
        logprobs, entropy, values = output
        return LossInputs(
            row=self.row,
            num_rows=self.num_rows,
            logprobs=self.of_actions(logprobs),
            weights=_floats(weights, device),
            entropy=entropy,
            values=values,
            **constants,
        )


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _floats(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return _tensor(array.astype(np.float32), device)
