"""Outcomes of scoring in; what to do with a group, and the error that stops the run, out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl_cluster.config.reward import RewardConfig
from rl_cluster.errors import ScorerError
from rl_cluster.trajectory import ScoreFailure, Scores

WINDOW = 50
"""Groups that the share of failures is taken over."""


@dataclass(frozen=True)
class FailurePolicy:
    """What happens to a group that a scorer could not answer for; it is never scored 0.

    max_retries: further attempts before the group is dropped. max_fraction: the run stops when more than
    this share of the last `window` groups was dropped.
    """

    max_retries: int
    max_fraction: float
    window: int = WINDOW

    @staticmethod
    def from_config(config: RewardConfig) -> FailurePolicy:
        retries = config.max_retries if config.on_failure == "retry" else 0
        return FailurePolicy(max_retries=retries, max_fraction=config.max_failure_fraction)

    def action(self, num_attempts: int) -> Literal["retry", "drop"]:
        """After so many failed attempts (1 or more) at one group."""
        return "retry" if num_attempts <= self.max_retries else "drop"


def first_failure(outcomes: Sequence[Scores | ScoreFailure]) -> ScoreFailure | None:
    """The failure that decides about a group that several scorers have looked at."""
    return next((outcome for outcome in outcomes if isinstance(outcome, ScoreFailure)), None)


class FailureWindow:
    """Remembers the last groups' final outcomes and raises ScorerError when too many failed.

    The run stops as soon as no further success could bring the share in the window back under the
    limit, so a scorer that always fails stops it after max_fraction × window groups, rounded down, plus one.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self._recent: deque[bool] = deque(maxlen=policy.window)
        self._kinds: Counter[str] = Counter()

    def record(self, failure: ScoreFailure | None) -> None:
        """One group's final outcome: None for scored, its failure for dropped."""
        self._recent.append(failure is not None)
        if failure is None:
            return
        self._kinds[f"{failure.name}/{failure.kind}"] += 1
        failed = sum(self._recent)
        if failed > self._policy.max_fraction * self._policy.window:
            raise ScorerError(failure.name, self._explain(failure, failed))

    @property
    def counts(self) -> dict[str, int]:
        """Failed groups since the start of the run, by `scorer/kind`."""
        return dict(self._kinds)

    @property
    def failure_fraction(self) -> float:
        """Share of failures among the groups in the window; 0 before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def _explain(self, failure: ScoreFailure, failed: int) -> str:
        lines = [
            f"scorer {failure.name!r} failed for {failed} of the last {len(self._recent)} groups "
            f"(rewards.max_failure_fraction={self._policy.max_fraction}); the last failure: "
            f"{failure.kind}: {failure.message}"
        ]
        return "\n".join(lines + ([failure.traceback.rstrip()] if failure.traceback else []))
