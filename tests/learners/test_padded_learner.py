"""Two ranks under ZeRO-3 train models that run as padded rows: every rank makes equally many calls, and the
gradient is that of one plain rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from learners.spec import LearnerSpec
from learners.start import start_local_learner, start_ray_learner
from rl_cluster.batch import TokenBatch
from tests.learners import rank_programs
from tests.learners.learner_cases import OPTIMIZER, STEP, make_batch, relative_difference
from tests.modeling.architectures import LINEAR, Case, save_tiny

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

KINDS = (Case("qwen3_5_text", LINEAR), Case("bloom", {"n_layer": 2, "n_head": 4}))
BATCHES: list[TokenBatch] = [make_batch(num_rows=7, seed=seed) for seed in range(3)]
"""Seven rows of 4 to 24 tokens over two ranks: other numbers of micro-batches and of lengths on each."""


@pytest.mark.parametrize("case", KINDS, ids=[case.kind for case in KINDS])
async def test_padded_rows_under_zero_3_train_as_on_one_plain_rank(
    case: Case, tmp_path: Path, ray_session: Iterator[None], caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(case, tmp_path)
    spec = LearnerSpec(
        str(tmp_path),
        optimizer=OPTIMIZER,
        total_steps=10,
        tokens_per_micro_batch=60,
        num_threads=1,
        persist_below=0,
        deadline_seconds=120,
        engine="torch",
    )
    with caplog.at_level(logging.WARNING):
        alone = start_local_learner(spec)
    assert "padded rows" in caplog.text
    expected = (await alone.apply(rank_programs.train, spec, BATCHES, STEP, 60))[0][0]
    whole = (await alone.apply(rank_programs.gradient, spec, BATCHES[0], [60], STEP))[0]
    zero = LearnerSpec(**(vars(spec) | {"engine": "deepspeed", "zero_stage": 3}))
    group = await start_ray_learner(zero, 2)
    try:
        ranks = await group.apply(rank_programs.train, zero, BATCHES, STEP, 60)
        gradients = await group.apply(rank_programs.gradient, zero, BATCHES[0], [30, 60], STEP)
    finally:
        group.close()
    for (results, _, _), gradient in zip(ranks, gradients, strict=True):
        # The norms of later updates tell whether the earlier ones made the same weights.
        assert [r.grad_norm for r in results] == pytest.approx([r.grad_norm for r in expected], rel=1e-4)
        assert relative_difference(gradient, whole) < 1e-4
