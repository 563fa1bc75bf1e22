"""Updates that were made or skipped in; NonFiniteError, with the cause, when training has come to nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rl_cluster.errors import NonFiniteError
from rl_cluster.protocols import OptimResult


class SkippedUpdates:
    """Of one model. limit: so many in a row end the run (health.max_skipped_updates)."""

    def __init__(self, limit: int, what: str = "the update") -> None:
        self._limit = limit
        self._what = what
        self._made = 0
        self._in_a_row = 0
        self._last: tuple[OptimResult, dict[str, float]] | None = None

    @property
    def last_was_skipped(self) -> bool:
        """Then the weights are those of before, and no checkpoint of now is worth one of then."""
        return self._in_a_row > 0

    def count(self, results: Sequence[OptimResult], sums: Mapping[str, float]) -> None:
        """Those of a step, in order. sums: of its losses. Raises NonFiniteError at the limit."""
        for result in results:
            if not result.skipped:
                self._made += 1
                self._in_a_row = 0
                continue
            self._in_a_row += 1
            self._last = result, dict(sums)
            if self._in_a_row >= self._limit:
                raise NonFiniteError(
                    f"{self._in_a_row} updates in a row were skipped (health.max_skipped_updates = "
                    f"{self._limit}): {self._cause()}"
                )

    def check_end(self) -> None:
        """Raise NonFiniteError where a whole run has not made a single update."""
        if self._last is not None and self._made == 0:
            raise NonFiniteError(f"every update of the run was skipped: {self._cause()}")

    def _cause(self) -> str:
        assert self._last is not None
        result, sums = self._last
        losses = [f"{name} = {value}" for name, value in sums.items() if not math.isfinite(value)]
        if losses:
            cause = f"the loss is not finite ({', '.join(losses[:3])})"
        else:
            cause = f"the loss is finite, its gradient is not (norm {result.grad_norm})"
        return (
            f"{cause} in {self._what}, with learning rate {result.learning_rate:g}. Nothing is exported. "
            "Lower optimizer.learning_rate or optimizer.max_grad_norm, or train with model.dtype: float32; "
            "go on from a checkpoint before."
        )
