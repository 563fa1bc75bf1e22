"""Passes over fixed data without a gradient: the reference's log-probabilities, KTO's baseline, evaluation.

A Learner and FitRows in, sums out. The small functions at the end run where the batch lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rl_cluster.algorithms.steps import LossStep
from rl_cluster.algorithms.totals import add_metrics
from rl_cluster.batch import TokenBatch
from rl_cluster.data.pairs import FitRows
from rl_cluster.protocols import BatchLayout, ForwardOutput, Learner

TOKENS_PER_CHUNK = 1 << 18
"""Tokens handed to the learner at once; it packs them into micro-batches itself."""


async def response_logprobs(learner: Learner, batch: TokenBatch, *, reference: bool = False) -> np.ndarray:
    """float64 [N]: the log-probability of each row's action tokens, summed. reference: adapters off."""
    parts = [np.zeros(0)]
    for rows in _chunks(batch, 1):
        part = batch.select(rows)
        output = await learner.forward(part, BatchLayout.of(part), reference=reference)
        sums = await learner.ask(sum_rows, part, output)
        parts.append(sums)
    return np.concatenate(parts)


async def with_reference(learner: Learner, rows: FitRows) -> FitRows:
    """The rows with the log-probabilities of the learner as it is now, adapters off."""
    own = await response_logprobs(learner, rows.batch, reference=True)
    other = None
    if rows.mismatched is not None:
        other = await response_logprobs(learner, rows.mismatched, reference=True)
    return attach(rows, own, other)


def attach(rows: FitRows, own: np.ndarray, other: np.ndarray | None) -> FitRows:
    """own, other: [N], the reference's log-probability of each row (and of each mismatched row).

    A row's whole sum stands at its last token: only sums over rows are ever used.
    """
    mismatched = rows.mismatched
    if mismatched is not None:
        assert other is not None
        mismatched = _on_last_token(mismatched, other)
    return replace(rows, batch=_on_last_token(rows.batch, own), mismatched=mismatched)


def attached(rows: FitRows) -> tuple[np.ndarray, np.ndarray | None]:
    """What `attach` was given, in float32."""
    column = rows.batch.reference_logprobs
    assert column is not None
    other = None
    if rows.mismatched is not None:
        assert rows.mismatched.reference_logprobs is not None
        other = rows.mismatched.reference_logprobs[rows.mismatched.offsets[1:] - 1]
    return column[rows.batch.offsets[1:] - 1], other


async def kl_baseline(learner: Learner, rows: FitRows) -> float:
    """KTO's z0 in nats: mean log π/reference over the mismatched rows, at least 0; 0 without such rows."""
    if rows.mismatched is None:
        return 0.0
    logprobs = await response_logprobs(learner, rows.mismatched)
    _, reference = attached(rows)
    assert reference is not None
    return max(0.0, float((logprobs - reference).mean()))


async def evaluate(learner: Learner, rows: FitRows, step: LossStep) -> dict[str, float]:
    """Sums of the step's loss and metrics over all rows, every example alike."""
    totals: dict[str, float] = {}
    for chunk in _chunks(rows.batch, rows.rows_per_example):
        part = rows.batch.select(chunk)
        output = await learner.forward(part, BatchLayout.of(part))
        metrics = await learner.ask(measure, step, part, output)
        add_metrics(totals, metrics)
    return totals


def _chunks(batch: TokenBatch, rows_per_example: int) -> Iterator[list[int]]:
    """Whole examples in order, about TOKENS_PER_CHUNK tokens at a time."""
    chunk: list[int] = []
    tokens = 0
    for first in range(0, batch.num_rows, rows_per_example):
        rows = range(first, first + rows_per_example)
        size = int(batch.lengths[first : first + rows_per_example].sum())
        if chunk and tokens + size > TOKENS_PER_CHUNK:
            yield chunk
            chunk, tokens = [], 0
        chunk.extend(rows)
        tokens += size
    if chunk:
        yield chunk


def _on_last_token(batch: TokenBatch, sums: np.ndarray) -> TokenBatch:
    column = np.zeros(len(batch.tokens), dtype=np.float32)
    column[batch.offsets[1:] - 1] = sums
    return batch.with_columns(reference_logprobs=column)


def sum_rows(batch: TokenBatch, output: ForwardOutput) -> np.ndarray:
    """float64 [N]: log-probabilities summed over each row's action tokens."""
    chosen = np.where(batch.action_mask, output.logprobs.astype(np.float64), 0.0)
    return np.bincount(batch.row_of_token, weights=chosen, minlength=batch.num_rows)


def measure(step: LossStep, batch: TokenBatch, output: ForwardOutput) -> dict[str, float]:
    """The step's metrics on outputs of a forward pass, every token at weight 1: sums, not means."""
    import torch

    from rl_cluster.algorithms.inputs import LossInputs
    from rl_cluster.algorithms.table import compute_loss

    drawn = np.flatnonzero(batch.action_mask)

    def tensor(column: np.ndarray | None) -> torch.Tensor | None:
        return None if column is None else torch.from_numpy(column[drawn].astype(np.float32))

    logprobs = tensor(output.logprobs)
    assert logprobs is not None
    inputs = LossInputs(
        row=torch.from_numpy(batch.row_of_token[drawn]),
        num_rows=batch.num_rows,
        logprobs=logprobs,
        weights=torch.ones_like(logprobs),
        values=tensor(output.values),
        reference_logprobs=tensor(batch.reference_logprobs),
        labels=tensor(batch.labels),
        margins=tensor(batch.margins),
    )
    return compute_loss(step, inputs).metrics
