"""The metrics of one step, from what the stages measured. Names and meanings: rl_cluster.metrics.names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_cluster.algorithms.sampling import has_signal
from rl_cluster.loop.buffer import ReadyGroup
from rl_cluster.loop.step import StepResult
from rl_cluster.protocols import PublishReport
from rl_cluster.rewards.shaping import ShapedScores

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class StepClock:
    """Seconds of the stages that the loop itself waits for."""

    step: float
    wait: float
    train: float
    sync: float


def step_metrics(
    groups: Sequence[ReadyGroup],
    shaped: ShapedScores,
    result: StepResult,
    clock: StepClock,
    publish: PublishReport | None,
    episode: int,
    version: int,
    kl_coef: float,
) -> Metrics:
    """version: of the weights before the update. publish: None where it failed."""
    return {
        **_objective(shaped, result, kl_coef),
        **_losses(result),
        **_lengths(groups),
        **_components(groups),
        **_performance(groups, clock, publish),
        **_lag(groups, version),
        "groups/without_signal": _without_signal(groups, shaped.raw),
        "episode": float(episode),
        "eps": len(shaped.raw) / clock.step,
    }


def _objective(shaped: ShapedScores, result: StepResult, kl_coef: float) -> Metrics:
    stats = result.stats
    non_score = np.where(np.isnan(shaped.scores), np.nan, stats.non_score_reward)
    return {
        "objective/kl": None if stats.kl is None else _mean_of_rows(result, stats.kl, "kl_sum"),
        "objective/entropy": _mean_of_rows(result, stats.entropy, "nll_sum"),
        "objective/non_score_reward": mean_of_known(non_score),
        "objective/rlhf_reward": mean_of_known(shaped.scores + non_score),
        "objective/scores": mean_of_known(shaped.raw),
        "objective/scores_std": std_of_known(shaped.raw),
        "objective/shaping": mean_of_known(shaped.scores - shaped.raw),
        "objective/kl_coef": kl_coef,
        **{f"shaping/{part}": mean_of_known(values) for part, values in shaped.parts.items()},
        "completions/without_reward_fraction": float(np.isnan(shaped.raw).mean()),
    }


def _mean_of_rows(result: StepResult, of_stats: np.ndarray, counted: str) -> float:
    rows = result.sums.get("rows_sum", 0.0)
    if result.stats_are_behaviours and rows and counted in result.sums:
        return result.sums[counted] / rows
    return float(of_stats.mean())


def mean_of_known(values: np.ndarray) -> float | None:
    """Of the values that are not NaN (samples without a reward); None where there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def std_of_known(values: np.ndarray) -> float | None:
    """As mean_of_known, the standard deviation (n)."""
    known = values[~np.isnan(values)]
    return float(known.std()) if len(known) else None


def _losses(result: StepResult) -> Metrics:
    sums, last = result.sums, result.optim[-1] if result.optim else None
    of_values = result.critic_sums or sums
    ratio, ratio_sq = _average(sums, "ratio"), _average(sums, "ratio_sq")
    return {
        "policy/approxkl_avg": _average(sums, "approxkl"),
        "policy/clipfrac_avg": _average(sums, "clipfrac"),
        "policy/entropy_avg": _average(sums, "entropy"),
        "policy/importance_weight_avg": _average(sums, "importance_weight"),
        "policy/importance_truncated_avg": _average(sums, "importance_truncated"),
        "loss/policy_avg": _per_update(sums, "policy_loss_weighted"),
        "loss/kl_avg": _per_update(sums, "kl_weighted"),
        "loss/value_avg": _per_update(of_values, "value_loss_weighted"),
        "loss/total_avg": _per_update(sums, "loss_sum"),
        "val/clipfrac_avg": _average(of_values, "value_clipfrac"),
        "val/ratio": ratio,
        "val/ratio_var": None if ratio is None or ratio_sq is None else max(ratio_sq - ratio**2, 0.0),
        "lr": last.learning_rate if last else None,
        "optim/grad_norm": last.grad_norm if last else None,
        "optim/skipped_updates": float(sum(update.skipped for update in result.optim)),
        **_gap_and_drift(result),
    }


def _gap_and_drift(result: StepResult) -> Metrics:
    """From the pass before the update, else as the loss counted them."""
    stats, sums = result.stats, result.sums
    tokens = sums.get("tokens_sum", 0.0)
    fresh = sums.get("fresh_sum", tokens)
    gap, drift = (stats.gap_mean, stats.gap_max), (stats.drift_mean, stats.drift_max)
    if gap == drift == (None, None):
        gap = _mean_and_max(sums, "gap", fresh)
        drift = _mean_and_max(sums, "drift", tokens - fresh)
    gap, drift = _if_known(gap), _if_known(drift)
    return {
        "health/logprob_gap_mean": gap[0],
        "health/logprob_gap_max": gap[1],
        "health/logprob_drift_mean": drift[0],
        "health/logprob_drift_max": drift[1],
    }


MeanAndMax = tuple[float | None, float | None]


def _mean_and_max(sums: dict[str, float], name: str, tokens: float) -> MeanAndMax:
    if tokens == 0:
        return None, None
    return sums[f"{name}_sum"] / tokens if f"{name}_sum" in sums else None, sums.get(f"{name}_max")


def _if_known(pair: MeanAndMax) -> MeanAndMax:
    """Responses that the caller brought: nobody knows with what probability they were drawn."""
    return (None, None) if pair[0] is not None and math.isnan(pair[0]) else pair


def _average(sums: dict[str, float], name: str) -> float | None:
    """The mean under the objective's own weights: of tokens, of completions, whatever the loss averages."""
    total, weighted = sums.get("weight_total", 0.0), sums.get(f"{name}_weighted")
    return weighted / total if weighted is not None and total > 0 else None


def _per_update(sums: dict[str, float], name: str) -> float | None:
    """A weighted sum is a term of the objective as it stands; the mean over the step's updates."""
    trained = sums.get("weight_total", 0.0) > 0
    return sums[name] / sums["updates_sum"] if name in sums and trained else None


def _lengths(groups: Sequence[ReadyGroup]) -> Metrics:
    eos = [flag for group in groups for flag in group.summary.ended_with_eos]
    truncated = [flag for group in groups for flag in group.summary.truncated]
    counts = [count for group in groups for count in group.summary.action_counts]
    return {
        "val/num_eos_tokens": float(sum(eos)),
        "completions/truncated_fraction": float(np.mean(truncated)),
        "completions/mean_length": float(np.mean(counts)),
        "completions/max_length": float(max(counts)),
    }


def _components(groups: Sequence[ReadyGroup]) -> Metrics:
    columns: dict[str, list[np.ndarray]] = {}
    for group in groups:
        for scores in group.scores:
            columns.setdefault(f"rewards/{scores.name}", []).append(scores.values)
            for name, values in scores.components.items():
                columns.setdefault(f"rewards/{scores.name}/{name}", []).append(values)
    return {name: mean_of_known(np.concatenate(values)) for name, values in columns.items()}


def _performance(groups: Sequence[ReadyGroup], clock: StepClock, publish: PublishReport | None) -> Metrics:
    times = [group.times for group in groups]
    generate = max(t.generated for t in times) - min(t.begun for t in times)
    generated = sum(sum(group.summary.action_counts) for group in groups)
    trained = sum(sum(group.summary.lengths) for group in groups)
    return {
        "perf/step_seconds": clock.step,
        "perf/wait_seconds": clock.wait,
        "perf/generate_seconds": generate,
        "perf/score_seconds": max(t.scored - t.generated for t in times),
        "perf/reference_seconds": max(t.referenced - t.generated for t in times)
        if any(group.reference is not None for group in groups)
        else 0.0,
        "perf/train_seconds": clock.train,
        "perf/sync_seconds": None if publish is None else clock.sync,
        "perf/sync_pause_seconds": None if publish is None else publish.pause_seconds,
        "perf/generated_tokens_per_second": generated / generate if generate > 0 else 0.0,
        "perf/trained_tokens_per_second": trained / clock.train,
    }


def _without_signal(groups: Sequence[ReadyGroup], raw: np.ndarray) -> float:
    """Groups whose scores are all equal; a single sample is compared with the whole batch."""
    known = raw[np.isfinite(raw)]
    batch_has = len(known) > 0 and has_signal(known)
    borders = np.cumsum([len(group.summary.lengths) for group in groups])[:-1]
    parts = [part[np.isfinite(part)] for part in np.split(raw, borders)]
    teaches = [(has_signal(part) if len(part) > 1 else batch_has and len(part) > 0) for part in parts]
    return float(len(parts) - sum(teaches))


def _lag(groups: Sequence[ReadyGroup], version: int) -> Metrics:
    lags = [version - group.summary.min_version for group in groups]
    return {"async/lag_mean": float(np.mean(lags)), "async/lag_max": float(max(lags))}
