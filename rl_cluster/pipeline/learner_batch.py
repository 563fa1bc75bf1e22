"""Padded tokens and a loss become the TokenBatch of a learner, and its results become padded again.

Legend: B rows, L positions, T real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rl_cluster.batch import TokenBatch
from rl_cluster.errors import BadInputError
from rl_cluster.pipeline.inputs import TokenInputs
from rl_cluster.pipeline.losses import BuiltInLoss
from rl_cluster.protocols import BatchLayout

COLUMNS = {"proximal_logprobs": "proximal_logprobs", "advantages": "advantages", "returns": "returns"}
"""LossInputs' field -> TokenBatch's column, where they only need to be laid end to end."""


@dataclass(frozen=True)
class LearnerBatch:
    """batch: without weights. places: int64 [T], where its tokens are among
    the B * L. trained: bool [T], the tokens that train (all others of action_mask are only reported)."""

    batch: TokenBatch
    places: np.ndarray
    trained: np.ndarray
    shape: tuple[int, int]

    @staticmethod
    def of(tokens: TokenInputs, loss: BuiltInLoss | None) -> LearnerBatch:
        """Raises BadInputError for what a learner cannot be asked."""
        ids = tokens.input_ids.cpu()
        real = (
            torch.ones_like(ids, dtype=torch.bool)
            if tokens.attention_mask is None
            else tokens.attention_mask.cpu()
        )
        has_target = tokens.trained.cpu()
        targets = tokens.targets.cpu()
        own = bool((targets == ids)[has_target].all())
        _require_no_holes(real)
        trained = has_target if loss is None else loss.trained(tokens).cpu()
        places = torch.nonzero(real.flatten())[:, 0].numpy()
        lengths = real.sum(-1).numpy().astype(np.int32)
        rows = np.arange(len(ids), dtype=np.int32)
        batch = TokenBatch(
            tokens=ids.flatten().numpy()[places].astype(np.int32),
            lengths=lengths,
            action_mask=has_target.flatten().numpy()[places],
            units=rows,
            group_ids=rows,
            target_ids=None if own else targets.flatten().numpy()[places].astype(np.int32),
            **({} if loss is None else _columns(loss, places)),
        )
        return LearnerBatch(batch, places, trained.flatten().numpy()[places], (ids.shape[0], ids.shape[1]))

    @property
    def layout(self) -> BatchLayout:
        return BatchLayout.of(self.batch)

    @property
    def summed(self) -> TokenBatch:
        """With a weight of 1 for every token that trains."""
        return self.batch.with_columns(weights=self.trained.astype(np.float32))

    def padded(self, column: np.ndarray) -> torch.Tensor:
        """float32 [B, L] of a column [T], 0 elsewhere."""
        result = np.zeros(self.shape[0] * self.shape[1], dtype=np.float32)
        result[self.places] = column
        return torch.from_numpy(result).view(self.shape)


def _columns(loss: BuiltInLoss, places: np.ndarray) -> dict[str, np.ndarray]:
    if "values" in loss.columns:
        raise BadInputError("values: on a cluster the learner's own critic computes them; leave them out")

    def end_to_end(column: torch.Tensor) -> np.ndarray:
        flat = column.detach().cpu().float().flatten().numpy()[places]
        values: np.ndarray = np.nan_to_num(flat)  # what is not finite was checked to be where nothing trains
        return values

    columns = {
        theirs: end_to_end(loss.columns[ours]) for ours, theirs in COLUMNS.items() if ours in loss.columns
    }
    if "old_values" in loss.columns:
        columns["values"] = end_to_end(loss.columns["old_values"])
    return columns


def _require_no_holes(real: torch.Tensor) -> None:
    begins = real.clone()
    begins[:, 1:] &= ~real[:, :-1]
    if bool((begins.sum(-1) > 1).any()):
        row = int((begins.sum(-1) > 1).nonzero()[0])
        raise BadInputError(f"attention_mask: row {row} has padding between tokens; pad on one side only")
