"""LearnerGroup: the verbs of protocols.Learner over the ranks of one learner, on Ray or in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from learners.handles import Call, RankHandle, answers
from learners.spec import LearnerSpec
from rl_cluster.algorithms.steps import LossStep
from rl_cluster.algorithms.totals import add_metrics
from rl_cluster.algorithms.weights import row_weights
from rl_cluster.batch import ShardPlan, plan_shards
from rl_cluster.errors import CheckpointError
from rl_cluster.protocols import BatchLayout, OptimParams, OptimResult, Ref


class LearnerGroup:
    """Implements protocols.Learner. Calls take effect in the order in which they were made.

    A rank that died raises WorkerDiedError, one that is late DeadlineError; the group is then of no use.
    """

    def __init__(self, spec: LearnerSpec, ranks: Sequence[RankHandle]) -> None:
        self.spec = spec
        self._ranks = tuple(ranks)

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    async def forward(self, batch: Ref, layout: BatchLayout, *, reference: bool = False) -> Ref:
        """A Ref of ForwardOutput, in the order of the batch. reference: see LearnerRank.forward_part."""
        plan = self._plan(layout, range(layout.num_rows))
        calls = [
            rank.submit("forward_part", batch, plan.micro_batches[index], reference, returns=2)
            for index, rank in enumerate(self._ranks)
        ]
        parts = [call.refs[0] for call in calls]
        whole = self._ranks[0].submit("assemble", sum(layout.lengths), *parts, returns=2)
        await self._answers("forward", [*calls, whole])
        return whole.refs[0]

    async def forward_backward(
        self, batch: Ref, layout: BatchLayout, rows: Sequence[int], loss: LossStep
    ) -> tuple[dict[str, float], Ref]:
        """Accumulate the gradient of the loss over `rows`, weighted over all of them together. Returns the
        sums, and a Ref of the log-probabilities float32 [T] of the same pass."""
        plan = self._plan(layout, rows)
        weights = self._ranks[0].put(self._row_weights(layout, rows, loss))
        calls = [
            rank.submit("forward_backward", batch, plan.micro_batches[index], weights, loss, returns=2)
            for index, rank in enumerate(self._ranks)
        ]
        parts = [call.refs[0] for call in calls]
        whole = self._ranks[0].submit("assemble_logprobs", sum(layout.lengths), *parts, returns=2)
        totals: dict[str, float] = {}
        for part in (await self._answers("forward_backward", [*calls, whole]))[:-1]:
            add_metrics(totals, part)
        return totals, whole.refs[0]

    async def optim_step(self, params: OptimParams | None = None) -> OptimResult:
        result: OptimResult = (await self._on_all("optim_step", params or OptimParams()))[0]
        return result

    async def forget_gradient(self) -> None:
        await self._on_all("forget_gradient")

    async def save(self, folder: Path) -> None:
        """Raises CheckpointError where a rank's files do not arrive in the folder that is seen here."""
        written = await self._on_all("save", folder)
        for rank, names in zip(self._ranks, written, strict=True):
            for name in names:
                if not (folder / name).is_file():
                    raise CheckpointError(
                        f"learner state: {folder / name}, which {rank.name} has written, is not seen by the "
                        "driver. Put run.dir on storage that all nodes share"
                    )

    async def load(self, folder: Path) -> None:
        await self._on_all("load", folder)

    async def export(self, folder: Path) -> None:
        await self._on_all("export", folder)

    async def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """On rank 0, Refs among args resolved."""
        call = self._ranks[0].submit("compute", function, *args)
        return (await self._answers(_name_of(function), [call]))[0]

    async def compute(self, function: Callable[..., tuple[Any, Any]], *args: Any) -> tuple[Any, Ref]:
        """As ask, of (small, big); the big one stays where it is made."""
        call = self._ranks[0].submit("compute", function, *args, returns=2)
        (small,) = await self._answers(_name_of(function), [call])
        return small, call.refs[0]

    def put(self, value: Any) -> Ref:
        return self._ranks[0].put(value)

    async def apply(
        self, function: Callable[..., Any], *args: Any, deadline_seconds: float | None = None
    ) -> list[Any]:
        """Call function(rank, *args) on every rank, in order with the other verbs; one answer per rank.

        rank is the LearnerRank: for what works on the weights themselves, such as publishing them.
        """
        calls = [rank.submit("apply", function, *args) for rank in self._ranks]
        return await self._answers(_name_of(function), calls, deadline_seconds)

    def close(self) -> None:
        """End the workers."""
        for rank in self._ranks:
            rank.close()

    def _plan(self, layout: BatchLayout, rows: Sequence[int]) -> ShardPlan:
        plan = plan_shards(
            layout.lengths,
            rows,
            layout.units,
            self.num_ranks,
            self.spec.tokens_per_micro_batch,
            layout.group_ids,
        )
        return plan if plan.micro_batches[0] else ShardPlan((((),),) * self.num_ranks)

    def _row_weights(self, layout: BatchLayout, rows: Sequence[int], loss: LossStep) -> np.ndarray:
        """float64 [N], 0 outside `rows`."""
        chosen = np.asarray(rows, dtype=np.int64)
        weights = np.zeros(layout.num_rows)
        counts = np.asarray(layout.action_counts)[chosen]
        weights[chosen] = row_weights(loss.aggregation, counts, self.spec.max_new_tokens)
        return weights

    async def _on_all(self, method: str, *args: Any) -> list[Any]:
        return await self._answers(method, [rank.submit(method, *args) for rank in self._ranks])

    async def _answers(
        self, what: str, calls: Sequence[Call], deadline_seconds: float | None = None
    ) -> list[Any]:
        return await answers(calls, f"learner {what}", deadline_seconds or self.spec.deadline_seconds)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
