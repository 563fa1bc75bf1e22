"""The scores of a step's groups in, as the scorers gave them; shaped ones, a row per sample, out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl_cluster.config.run import RunConfig
from rl_cluster.loop.buffer import ReadyGroup
from rl_cluster.rewards.shaping import RunningMoments, ShapedScores, shape_scores


def shape_groups(
    groups: Sequence[ReadyGroup], weights: Mapping[str, float], config: RunConfig, moments: RunningMoments
) -> ShapedScores:
    """weights: scorer -> its weight. moments: of the scores so far; those to go on with are in the result."""
    columns: dict[str, list[np.ndarray]] = {}
    for group in groups:
        for scores in group.scores:
            columns.setdefault(scores.name, []).append(scores.values)
    summaries = [group.summary for group in groups]
    return shape_scores(
        {name: np.concatenate(values) for name, values in columns.items()},
        # Scores that the caller brought come from no scorer, and count as they are.
        {name: weights.get(name, 1.0) for name in columns},
        action_counts=[count for s in summaries for count in s.action_counts],
        ended_with_eos=[flag for s in summaries for flag in s.ended_with_eos],
        max_new_tokens=config.rollout.max_new_tokens,
        shaping=config.rewards.shaping,
        moments=moments,
    )
