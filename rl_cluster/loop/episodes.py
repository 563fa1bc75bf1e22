"""A task in, its group out, or the failure of its environment that remained after the last attempt."""

from __future__ import annotations

import itertools

from rl_cluster.errors import EpisodeError
from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.protocols import Ref
from rl_cluster.rewards.failures import FailurePolicy
from rl_cluster.trajectory import GroupSummary, GroupTask, ScoreFailure

NAME = "environment"
"""Under which its failures are counted, beside those of scorers."""


async def roll_out(
    pool: RolloutPool, task: GroupTask, policy: FailurePolicy
) -> tuple[GroupSummary, Ref] | ScoreFailure:
    """The group is played again, with the same seeds, as rewards.on_failure and max_retries say."""
    for attempt in itertools.count(1):
        try:
            return await pool.rollout(task)
        except EpisodeError as error:
            kind, message, trace = error.args
            if policy.action(attempt) == "drop":
                return ScoreFailure(NAME, kind, message, trace)
    raise AssertionError("unreachable")
