"""Sequences on their way to the learner: TokenBatch, and the plan that spreads its rows over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl_cluster.trajectory import Trajectory

TOKEN_COLUMNS = (
    "policy_versions",
    "behaviour_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "exact_kl",
    "values",
    "advantages",
    "returns",
    "weights",
    "labels",
    "margins",
)

TARGET_COLUMNS = ("target_ids", "target_weights")


@dataclass(frozen=True)
class TokenBatch:
    """N sequences laid end to end, T tokens in all, without padding. numpy, because it travels.

    Every per-token column is aligned on the *target*: entry t speaks of token t being drawn
    given the tokens before it (so the first token of a sequence is never an action).

    tokens: int32 [T]. lengths: int32 [N], their sum is T. action_mask: bool [T].
    units: int32 [N], rows with the same unit stay in one micro-batch (the two sides of a pair).
    group_ids: int32 [N], which prompt group a row belongs to.
    policy_versions: int32 [T], optional, as in Trajectory.
    The optional float32 [T] columns: log-probabilities (natural log, at the sampling temperature)
    under the behaviour, proximal and reference policies; exact_kl, the divergence of the proximal from the
    reference policy's whole distribution (nats); values of the state before the token;
    advantages; returns (value targets); weights (the loss is sum of weights times per-token loss).
    labels (of a row, above 0 where desirable), margins (of a pair, on its first row): at a row's last token.
    target_ids: int32 [T] or [T, K], optional: at an action, the ids whose log-probability is meant where that
    is not the token itself. target_weights: float32 [T, K]: the action's log-probability is then the sum of
    weight times log-probability over its K ids; an id of weight 0 is not there.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    action_mask: np.ndarray
    units: np.ndarray
    group_ids: np.ndarray
    behaviour_logprobs: np.ndarray | None = None
    proximal_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    exact_kl: np.ndarray | None = None
    values: np.ndarray | None = None
    advantages: np.ndarray | None = None
    returns: np.ndarray | None = None
    weights: np.ndarray | None = None
    labels: np.ndarray | None = None
    margins: np.ndarray | None = None
    policy_versions: np.ndarray | None = None
    target_ids: np.ndarray | None = None
    target_weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        num_tokens, num_rows = len(self.tokens), len(self.lengths)
        assert int(self.lengths.sum()) == num_tokens
        assert self.action_mask.shape == (num_tokens,)
        assert self.action_mask.dtype == np.bool_
        assert self.units.shape == self.group_ids.shape == (num_rows,)
        for name in TOKEN_COLUMNS:
            column = getattr(self, name)
            assert column is None or column.shape == (num_tokens,), f"{name}: wrong shape"
        ids, weights = self.target_ids, self.target_weights
        assert ids is None or (ids.ndim in (1, 2) and len(ids) == num_tokens), "target_ids: wrong shape"
        several = ids is not None and ids.ndim == 2
        assert (weights is not None) == several, "target_weights: where there are K ids, and only there"
        assert weights is None or ids is None or weights.shape == ids.shape, "target_weights: wrong shape"

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        """int64 [N + 1]: row i is tokens[offsets[i]:offsets[i + 1]]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @property
    def row_of_token(self) -> np.ndarray:
        """int64 [T]: the row that each token belongs to."""
        return np.repeat(np.arange(self.num_rows), self.lengths)

    @property
    def action_counts(self) -> np.ndarray:
        """int64 [N]: drawn tokens per row."""
        return np.bincount(self.row_of_token, weights=self.action_mask, minlength=self.num_rows).astype(
            np.int64
        )

    def select(self, rows: Sequence[int]) -> TokenBatch:
        """The rows asked for, in the order asked for."""
        offsets, chosen = self.offsets, np.asarray(rows, dtype=np.int64)
        pieces = [np.arange(offsets[r], offsets[r + 1]) for r in chosen]
        index = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)

        def of_tokens(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else column[index]

        return TokenBatch(
            tokens=self.tokens[index],
            lengths=self.lengths[chosen],
            action_mask=self.action_mask[index],
            units=self.units[chosen],
            group_ids=self.group_ids[chosen],
            **{name: of_tokens(getattr(self, name)) for name in (*TOKEN_COLUMNS, *TARGET_COLUMNS)},
        )

    def with_columns(self, **columns: np.ndarray | None) -> TokenBatch:
        """A copy with the named columns replaced."""
        return replace(self, **columns)  # type: ignore[arg-type]

    @staticmethod
    def from_trajectories(trajectories: Sequence[Trajectory], group_ids: Sequence[int]) -> TokenBatch:
        """One row per trajectory, each a unit of its own."""
        return TokenBatch(
            tokens=np.concatenate([t.tokens for t in trajectories]),
            lengths=np.array([len(t.tokens) for t in trajectories], dtype=np.int32),
            action_mask=np.concatenate([t.action_mask for t in trajectories]),
            units=np.arange(len(trajectories), dtype=np.int32),
            group_ids=np.asarray(group_ids, dtype=np.int32),
            policy_versions=np.concatenate([t.policy_versions for t in trajectories]),
            behaviour_logprobs=np.concatenate([t.behaviour_logprobs for t in trajectories]),
        )


@dataclass(frozen=True)
class ShardPlan:
    """Who computes what: micro_batches[rank][i] are the rows of that rank's i-th micro-batch.

    Every rank has the same number of micro-batches (collectives must match); the lists at the end
    may be empty, and the learner then runs a dummy sequence whose loss is 0.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]


def plan_shards(
    lengths: Sequence[int],
    rows: Sequence[int],
    units: Sequence[int],
    num_ranks: int,
    tokens_per_micro_batch: int,
    groups: Sequence[int] | None = None,
) -> ShardPlan:
    """Spread `rows` over ranks and micro-batches.

    Units go, longest first, to the rank with the fewest tokens so far; within a rank, units of like
    length share micro-batches of at most `tokens_per_micro_batch` tokens (a longer unit stands alone).
    The rows of a group travel as one unit where that costs no balance, because the learner computes the
    prompt that they share once per micro-batch. Deterministic. lengths, units, groups: indexed by row.
    """
    members: dict[tuple[str, int], list[int]] = {}
    joined = _joined_groups(lengths, rows, num_ranks, tokens_per_micro_batch, groups)
    for row in rows:
        together = groups is not None and int(groups[row]) in joined
        key = ("group", int(groups[row])) if groups is not None and together else ("unit", int(units[row]))
        members.setdefault(key, []).append(int(row))
    cost = {unit: sum(int(lengths[r]) for r in unit_rows) for unit, unit_rows in members.items()}
    by_length = sorted(members, key=lambda unit: (-cost[unit], unit))
    load = [0] * num_ranks
    assigned: list[list[tuple[str, int]]] = [[] for _ in range(num_ranks)]
    for unit in by_length:
        rank = min(range(num_ranks), key=lambda r: (load[r], r))
        assigned[rank].append(unit)
        load[rank] += cost[unit]
    per_rank = [_fill(units_of_rank, members, cost, tokens_per_micro_batch) for units_of_rank in assigned]
    most = max((len(batches) for batches in per_rank), default=0)
    return ShardPlan(tuple(tuple(batches + [()] * (most - len(batches))) for batches in per_rank))


GROUPS_PER_RANK = 4
"""Groups stay whole only where none has more than 1 / GROUPS_PER_RANK of a rank's share of the tokens."""


def _joined_groups(
    lengths: Sequence[int], rows: Sequence[int], num_ranks: int, budget: int, groups: Sequence[int] | None
) -> set[int]:
    if groups is None:
        return set()
    cost: dict[int, int] = {}
    for row in rows:
        cost[int(groups[row])] = cost.get(int(groups[row]), 0) + int(lengths[row])
    share = sum(cost.values()) / num_ranks
    limit = budget if num_ranks == 1 else min(budget, share / GROUPS_PER_RANK)
    return {group for group, tokens in cost.items() if tokens <= limit}


def _fill(
    units: list[tuple[str, int]],
    members: dict[tuple[str, int], list[int]],
    cost: dict[tuple[str, int], int],
    budget: int,
) -> list[tuple[int, ...]]:
    batches: list[tuple[int, ...]] = []
    rows: list[int] = []
    used = 0
    for unit in units:
        if rows and used + cost[unit] > budget:
            batches.append(tuple(rows))
            rows, used = [], 0
        rows.extend(members[unit])
        used += cost[unit]
    if rows:
        batches.append(tuple(rows))
    return batches
