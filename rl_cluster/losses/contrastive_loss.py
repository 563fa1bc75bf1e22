"""Embeddings of things that belong together, and of things that do not, in; one loss per row out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError
from rl_cluster.losses.base import CustomLoss, CustomLossConfig


def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return 1.0 - F.cosine_similarity(a, b, dim=-1)


def _euclidean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(a - b, dim=-1)


DISTANCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": _cosine,
    "euclidean": _euclidean,
}


class ContrastiveLoss(CustomLoss):
    """Triplets: max(0, d(anchor, positive) − d(anchor, negative) + margin), Schroff et al. 2015.

    Pairs with labels: y d² + (1 − y) max(0, margin − d)², Hadsell et al. 2006. d is the distance divided by
    the config's temperature; distance_metric: "cosine" (1 − cosine similarity) or "euclidean".
    """

    def __init__(
        self,
        config: CustomLossConfig | None = None,
        margin: float = 1.0,
        distance_metric: str = "cosine",
    ) -> None:
        super().__init__(CustomLossConfig(name="contrastive") if config is None else config)
        check_number("ContrastiveLoss.margin", margin, at_least=0.0)
        if distance_metric not in DISTANCES:
            raise BadInputError(
                f"ContrastiveLoss.distance_metric={distance_metric!r}: one of {', '.join(DISTANCES)}."
            )
        self.margin = margin
        self.distance_metric = distance_metric

    def compute_loss(
        self,
        anchor: torch.Tensor,
        positive: torch.Tensor,
        negative: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B]. anchor, positive, negative: [B, D]. labels: [B], 1 for a pair that belongs together or 0."""
        if (negative is None) == (labels is None):
            given = "neither" if negative is None else "both"
            raise BadInputError(
                f"ContrastiveLoss: {given} of negative and labels given. Pass `negative` for triplets "
                "or `labels` for pairs."
            )
        near = self._distance(anchor, positive)
        if negative is not None:
            return F.relu(near - self._distance(anchor, negative) + self.margin)
        assert labels is not None, "checked above"
        if labels.shape != near.shape:
            raise BadInputError(
                f"ContrastiveLoss: labels {tuple(labels.shape)} for {tuple(near.shape)} pairs: one per pair."
            )
        together = labels.to(near.dtype)
        return together * near.square() + (1.0 - together) * F.relu(self.margin - near).square()

    def temper(self, arguments: dict[str, Any]) -> dict[str, Any]:
        # A cosine does not feel the length of its arguments: the distances are divided instead.
        return arguments

    def _distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.shape != b.shape:
            raise BadInputError(f"ContrastiveLoss: embeddings {tuple(a.shape)} and {tuple(b.shape)} differ.")
        return DISTANCES[self.distance_metric](a, b) / self.config.temperature
