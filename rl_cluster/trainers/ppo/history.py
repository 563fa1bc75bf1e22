"""The metrics of iterations in; the lists that train() returns and the stats that step() returns out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_cluster.loop.hooks import Wishes
from rl_cluster.loop.report import Metrics

COLUMNS = {
    "policy_loss": "loss/policy_avg",
    "value_loss": "loss/value_avg",
    "kl_divergence": "objective/kl",
    "entropy": "policy/entropy_avg",
    "rewards": "objective/scores",
    "kl_coef": "objective/kl_coef",
}
"""What train() returns -> the metric (docs and rl_cluster.metrics.names say what each means)."""

TRL_STATS = {
    "objective/kl": "objective/kl",
    "objective/kl_coef": "objective/kl_coef",
    "objective/entropy": "objective/entropy",
    "ppo/mean_scores": "objective/scores",
    "ppo/std_scores": "objective/scores_std",
    "ppo/mean_non_score_reward": "objective/non_score_reward",
    "ppo/loss/policy": "loss/policy_avg",
    "ppo/loss/value": "loss/value_avg",
    "ppo/policy/entropy": "policy/entropy_avg",
    "ppo/policy/approxkl": "policy/approxkl_avg",
    "ppo/policy/clipfrac": "policy/clipfrac_avg",
    "ppo/policy/ratio": "val/ratio",
    "ppo/val/clipfrac": "val/clipfrac_avg",
    "ppo/learning_rate": "lr",
    "tokens/responses_len_mean": "completions/mean_length",
    "time/ppo/total": "perf/train_seconds",
}
"""What step() returns under TRL's (≤ 0.11) names -> the metric."""


class PPOHistory(dict[str, list[float | None]]):
    """One list per column, an entry per iteration; pickled, an ordinary dict.

    kl_divergence is None where there is no reference (β = 0).
    """

    def __init__(
        self, rows: Sequence[Mapping[str, float | None]], model: Callable[[], Any] = lambda: None
    ) -> None:
        """rows: metrics, one per iteration. model: finds the trained model."""
        super().__init__({name: [row.get(metric) for row in rows] for name, metric in COLUMNS.items()})
        self._model = model

    @property
    def model(self) -> Any:
        """The trained model, as trainer.model: one that was given by name is only loaded now."""
        return self._model()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def step_stats(metrics: Metrics, value_coef: float) -> dict[str, float | None]:
    """All metrics under their own names, and under TRL's; ppo/loss/total = policy + value_coef · value."""
    stats = {**metrics, **{trl: metrics.get(name) for trl, name in TRL_STATS.items()}}
    policy, value = metrics.get("loss/policy_avg"), metrics.get("loss/value_avg")
    both = policy is not None and value is not None
    stats["ppo/loss/total"] = policy + value_coef * value if both else None  # type: ignore[operator]
    return stats


class IterationLog:
    """Implements loop.Hooks: keeps the metrics of every iteration, in order."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float | None]] = []

    def on_begin(self, step: int, last_step: int, folder: Path) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> Wishes:
        self.rows.append(dict(metrics))
        return Wishes()

    def on_evaluate(self, step: int, metrics: Mapping[str, float | None]) -> Wishes:
        return Wishes()

    def on_save(self, step: int, checkpoint: Path) -> None: ...

    def on_end(self, step: int) -> None: ...
