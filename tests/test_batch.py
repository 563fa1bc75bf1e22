"""TokenBatch keeps rows and columns together; plan_shards covers every row once and within the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_cluster.batch import TokenBatch, plan_shards


def make_batch(lengths: list[int]) -> TokenBatch:
    total = sum(lengths)
    rows = np.arange(len(lengths), dtype=np.int32)
    return TokenBatch(
        tokens=np.arange(total, dtype=np.int32),
        lengths=np.array(lengths, dtype=np.int32),
        action_mask=np.arange(total) % 2 == 1,
        units=rows,
        group_ids=rows // 2,
        advantages=np.arange(total, dtype=np.float32) / 10,
    )


def test_select_takes_whole_rows_in_the_order_asked_for() -> None:
    chosen = make_batch([2, 3, 4]).select([2, 0])
    assert chosen.tokens.tolist() == [5, 6, 7, 8, 0, 1]
    assert chosen.advantages is not None
    assert chosen.advantages.tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.0, 0.1])
    assert chosen.lengths.tolist() == [4, 2]
    assert chosen.group_ids.tolist() == [1, 0]
    assert chosen.action_counts.tolist() == [2, 1]


def test_longest_first_to_the_lightest_rank() -> None:
    plan = plan_shards([5, 1, 4, 3], [0, 1, 2, 3], [0, 1, 2, 3], num_ranks=2, tokens_per_micro_batch=5)
    assert plan.micro_batches == (((0,), (1,)), ((2,), (3,)))


def test_ranks_without_work_get_empty_micro_batches() -> None:
    plan = plan_shards([3, 3, 3], [0, 1, 2], [0, 1, 2], num_ranks=2, tokens_per_micro_batch=3)
    assert plan.micro_batches == (((0,), (2,)), ((1,), ()))


def test_rows_of_a_unit_are_never_parted_even_above_the_budget() -> None:
    plan = plan_shards([4, 4, 1], [0, 1, 2], [7, 7, 8], num_ranks=1, tokens_per_micro_batch=6)
    assert plan.micro_batches == (((0, 1), (2,)),)


def test_groups_share_a_micro_batch_so_that_their_prompt_is_computed_once() -> None:
    lengths, groups = [4] * 8, [0, 1] * 4
    plan = plan_shards(lengths, range(8), range(8), 1, tokens_per_micro_batch=16, groups=groups)
    assert plan.micro_batches == (((0, 2, 4, 6), (1, 3, 5, 7)),)


def test_groups_are_split_where_whole_ones_would_unbalance_the_ranks() -> None:
    plan = plan_shards([4] * 6, range(6), range(6), 2, tokens_per_micro_batch=100, groups=[0] * 6)
    assert [sum(len(rows) for rows in rank) for rank in plan.micro_batches] == [3, 3]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(10, 100),
    st.booleans(),
)
def test_every_row_once_within_the_budget_and_as_many_micro_batches_on_every_rank(
    lengths: list[int], num_ranks: int, budget: int, grouped: bool
) -> None:
    rows = range(len(lengths))
    groups = [row // 3 for row in rows] if grouped else None
    plan = plan_shards(lengths, rows, rows, num_ranks, budget, groups)
    seen = [row for rank in plan.micro_batches for micro in rank for row in micro]
    assert sorted(seen) == list(rows)
    assert len({len(rank) for rank in plan.micro_batches}) == 1
    for micro in (micro for rank in plan.micro_batches for micro in rank):
        assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget
