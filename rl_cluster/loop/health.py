"""A step's metrics go in, alarms come out: engine against learner, rewards without signal, a collapse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rl_cluster.algorithms.table import compares_within_group
from rl_cluster.config.run import RunConfig

GAP_LIMIT = {"float32": 0.05, "bfloat16": 0.2}
"""health.max_logprob_gap by model.dtype, at temperature 1; nats."""
TRUNCATED_GAP_LIMIT = 1.0
"""The same with top-p or top-k: the engine's probabilities are then those of the truncated distribution."""
AT_ONCE = 10.0
"""A gap of so many limits ends the run without a second step."""
FLAT = 1e-3
"""Scores that vary by less than this share of their size or first deviation are flat."""

COLLAPSE = {
    "policy/entropy_avg": (
        "the policy has become almost deterministic. Where the score is not at its best: lower "
        "optimizer.learning_rate, raise algorithm.loss.entropy_coef or algorithm.kl.coef, or sample hotter "
        "(rollout.temperature)"
    ),
    "completions/mean_length": (
        "responses have become short. See samples.jsonl; if the rewards favour that, change them, or raise "
        "algorithm.kl.coef and lower optimizer.learning_rate"
    ),
    "objective/scores_std": (
        "rewards hardly differ any more, so that little is left to learn from. Give other prompts, "
        "a finer reward, more samples (batch.samples_per_prompt), or set batch.dynamic_sampling=true"
    ),
}
"""Metrics that must not fall to health.collapse_ratio of what they were -> what it means, and the remedy."""

Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class Alarm:
    """metric: the one that gives it. fatal: the run must end."""

    metric: str
    message: str
    fatal: bool = False


class HealthMonitor:
    """`check` once per step, in order. Begins anew with a resumed run."""

    def __init__(self, config: RunConfig) -> None:
        self._health = config.health
        self._gap_limit = _gap_limit(config)
        self._within_group = compares_within_group(config.algorithm)
        self._above: dict[str, int] = {}
        self._without_signal = 0
        self._history: dict[str, list[float]] = {}
        self._told: set[str] = set()

    def check(self, step: int, metrics: Metrics, num_groups: int) -> list[Alarm]:
        """metrics: as reported of this step. num_groups: of its batch."""
        found = [
            self._too_large(
                metrics, "health/logprob_gap_mean", self._gap_limit, "max_logprob_gap", _MISMATCH
            ),
            self._too_large(
                metrics,
                "health/logprob_drift_mean",
                self._health.max_logprob_drift,
                "max_logprob_drift",
                _DRIFT,
            ),
            self._no_signal(metrics, num_groups),
            *(self._collapse(metrics, name, remedy) for name, remedy in COLLAPSE.items()),
            self._flat_reward(metrics),
        ]
        return [Alarm(a.metric, f"step {step}: {a.message}", a.fatal) for a in found if a is not None]

    def _too_large(
        self, metrics: Metrics, name: str, limit: float, setting: str, meaning: str
    ) -> Alarm | None:
        value = metrics.get(name)
        if value is None:
            return None
        if value <= limit:
            self._above[name] = 0
            return None
        self._above[name] = self._above.get(name, 0) + 1
        fatal = self._above[name] >= 2 or value > AT_ONCE * limit
        end = "" if fatal else " A second step like this ends the run."
        return Alarm(
            name,
            f"{name} is {value:.3g} nats, above health.{setting}={limit:g}: {meaning}.{end}",
            fatal,
        )

    def _no_signal(self, metrics: Metrics, num_groups: int) -> Alarm | None:
        mean, deviation = metrics.get("objective/scores") or 0.0, metrics.get("objective/scores_std") or 0.0
        if self._within_group:
            flat = metrics.get("groups/without_signal") == num_groups
        else:
            flat = deviation <= 1e-9 * max(1.0, abs(mean))
        self._without_signal = self._without_signal + 1 if flat else 0
        first = self._health.no_signal_steps
        # Told again after twice, four times … as many steps.
        times = self._without_signal // first if first and self._without_signal % first == 0 else 0
        if times == 0 or times & (times - 1):
            return None
        which = "within each group" if self._within_group else "of the whole batch"
        return Alarm(
            "groups/without_signal",
            f"the rewards {which} have been equal for {self._without_signal} steps (mean {mean:g}), so that "
            "nothing is learned from them (groups/without_signal). If that is the best score, the task is "
            "solved or too easy; otherwise see samples.jsonl, check the reward, give easier prompts, raise "
            "batch.samples_per_prompt or rollout.temperature",
        )

    def _values(self, metrics: Metrics, name: str) -> list[float] | None:
        """Of all steps so far, once there are two windows of them."""
        value = metrics.get(name)
        window = self._health.collapse_window
        if value is None or not np.isfinite(value) or window == 0:
            return None
        values = self._history.setdefault(name, [])
        values.append(value)
        # The first window is what later ones are compared with; of those only the last two count.
        del values[window : max(window, len(values) - 2 * window)]
        return values if len(values) >= 2 * window else None

    def _begins(self, name: str, holds: bool) -> bool:
        """An alarm is told once for as long as it holds, and again when it comes back."""
        begins = holds and name not in self._told
        (self._told.add if holds else self._told.discard)(name)
        return begins

    def _collapse(self, metrics: Metrics, name: str, remedy: str) -> Alarm | None:
        values, window = self._values(metrics, name), self._health.collapse_window
        if values is None:
            return None
        before, now = float(np.mean(values[:window])), float(np.mean(values[-window:]))
        if not self._begins(name, before > 0 and now <= self._health.collapse_ratio * before):
            return None
        return Alarm(
            name,
            f"{name} has fallen from {before:.3g} (first {window} steps) to {now:.3g} (last {window}): "
            f"{remedy}",
        )

    def _flat_reward(self, metrics: Metrics) -> Alarm | None:
        name = "objective/scores"
        values, window = self._values(metrics, name), self._health.collapse_window
        if values is None:
            return None
        last = values[-2 * window :]
        scale = max(float(np.abs(last).max()), *self._history.get("objective/scores_std", [0.0])[:window])
        if not self._begins(name, bool(np.ptp(last) <= FLAT * scale)):
            return None
        return Alarm(
            name,
            f"{name} has been flat at {last[-1]:.3g} for {len(last)} steps: the rewards no longer change. If "
            "that is the best score, the run can end; otherwise see samples.jsonl, check the reward, raise "
            "optimizer.learning_rate or rollout.temperature",
        )


_MISMATCH = (
    "the engine gives its own tokens other probabilities than the learner does with the same weights. The "
    "engine may serve other weights, compute the model differently, or sample at another temperature; "
    "compare with model.dtype=float32, and raise the limit only for a reason that you know"
)
_DRIFT = (
    "the policy is far from the weights that drew its tokens. Lower optimizer.learning_rate or "
    "async.max_policy_lag"
)


def _gap_limit(config: RunConfig) -> float:
    """health.max_logprob_gap, or by dtype; rounding errors of logits grow with 1 / temperature."""
    if config.health.max_logprob_gap is not None:
        return config.health.max_logprob_gap
    rollout = config.rollout
    limit = GAP_LIMIT[config.model.dtype] / min(1.0, rollout.temperature)
    truncated = rollout.top_p < 1 or rollout.top_k > 0
    return max(limit, TRUNCATED_GAP_LIMIT) if truncated else limit
