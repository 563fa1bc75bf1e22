"""Imitation with any Learner: batches of demonstrations in, updated weights and a loss per step out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rl_cluster.algorithms.steps import CrossEntropyStep
from rl_cluster.batch import TokenBatch
from rl_cluster.loop.skipped import SkippedUpdates
from rl_cluster.protocols import BatchLayout, Learner, OptimResult


async def run_supervised(
    learner: Learner,
    batches: Iterable[TokenBatch],
    on_step: Callable[[int, float, OptimResult], None] = lambda step, loss, result: None,
    max_skipped_updates: int = 5,
) -> None:
    """One update per batch, minimising the mean of −log π over the tokens of its action_mask. Raises
    NonFiniteError after so many skipped ones in a row.

    on_step(step, loss, result): step counted from 1, loss in nats per token before the update.
    """
    skipped = SkippedUpdates(max_skipped_updates, "the supervised update")
    for step, batch in enumerate(batches, start=1):
        layout = BatchLayout.of(batch)
        sums, _ = await learner.forward_backward(batch, layout, range(batch.num_rows), CrossEntropyStep())
        result = await learner.optim_step()
        skipped.count([result], sums)
        on_step(step, sums["nll_sum"] / sums["tokens_sum"], result)
    skipped.check_end()
