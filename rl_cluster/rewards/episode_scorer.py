"""The Scorer of runs with an environment: a group in, what the environment paid for each episode out."""

from __future__ import annotations

import numpy as np

from rl_cluster.protocols import Ref
from rl_cluster.trajectory import ScoreFailure, Scores, TrajectoryGroup


class EpisodeScorer:
    """Implements protocols.Scorer; a group's Ref is the TrajectoryGroup itself."""

    def __init__(self, name: str, weight: float = 1.0) -> None:
        self.name = name
        self.weight = weight

    async def score(self, group: Ref) -> Scores | ScoreFailure:
        return episode_scores(self.name, group)


def episode_scores(name: str, group: TrajectoryGroup) -> Scores | ScoreFailure:
    """values: the episodes' rewards. components: the metrics that every episode of the group has."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    if None in rewards:
        return ScoreFailure(name, "raised", "the group was not played in an environment: it has no rewards")
    common = set.intersection(*(set(trajectory.components) for trajectory in group.trajectories))
    components = {
        key: np.array([t.components[key] for t in group.trajectories], dtype=np.float64)
        for key in sorted(common)
    }
    return Scores(name, np.array(rewards, dtype=np.float64), components)
