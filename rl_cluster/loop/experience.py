"""Pure functions, run where the data are: groups in, a TokenBatch with advantages and numbers out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl_cluster.algorithms.table import AdvantageInputs, compute_advantages
from rl_cluster.batch import TokenBatch
from rl_cluster.config.algorithm import AlgorithmConfig
from rl_cluster.protocols import BatchLayout, ForwardOutput
from rl_cluster.trajectory import TrajectoryGroup


def assemble(num_groups: int, mask_truncated: bool, *refs: object) -> tuple[BatchLayout, TokenBatch]:
    """Lay groups end to end. refs: num_groups TrajectoryGroups, then as many reference columns, or none.

    With mask_truncated, samples that were cut off count 0 trainable tokens in the layout.
    """
    groups: list[TrajectoryGroup] = list(refs[:num_groups])  # type: ignore[arg-type]
    trajectories = [t for group in groups for t in group.trajectories]
    batch = TokenBatch.from_trajectories(
        trajectories, [group.group_id for group in groups for _ in group.trajectories]
    )
    if len(refs) > num_groups:
        columns: list[np.ndarray] = list(refs[num_groups:])  # type: ignore[arg-type]
        batch = batch.with_columns(reference_logprobs=np.concatenate(columns))
    counts = batch.action_counts
    if mask_truncated:
        counts = np.where([t.finish_reason == "length" for t in trajectories], 0, counts)
    return BatchLayout.of(batch, counts), batch


MeanAndMax = tuple[float | None, float | None]


@dataclass(frozen=True)
class BatchStats:
    """Numbers for the metrics, over one batch of N samples; float64 [N] unless said otherwise.

    kl: sum over tokens of log π/ref, or None without a reference. non_score_reward: −β·kl as it entered
    the reward. entropy: −Σ log π. gap_mean, gap_max: |learner − engine| log-probability per token drawn by
    the present weights, drift_mean, drift_max: by older ones (None without such tokens, and all four when
    there was no forward pass before the update).
    """

    kl: np.ndarray | None
    non_score_reward: np.ndarray
    entropy: np.ndarray
    gap_mean: float | None
    gap_max: float | None
    drift_mean: float | None = None
    drift_max: float | None = None


def add_advantages(
    algorithm: AlgorithmConfig,
    scores: np.ndarray,
    kl_coef: float,
    batch: TokenBatch,
    reference: ForwardOutput | None,
    policy: ForwardOutput | None,
    critic: ForwardOutput | None,
    version: int | None = None,
) -> tuple[BatchStats, TokenBatch]:
    """Give a batch its proximal and reference log-probabilities, values, advantages and returns.

    scores: float64 [N], shaped. reference: a pass of the learner, when there is no reference worker. policy:
    the pass before the update, or None when the step needs none. critic: the pass
    of a separate critic; a shared one answers in `policy`. version: of the present weights.
    """
    if reference is not None:
        batch = batch.with_columns(reference_logprobs=reference.logprobs, exact_kl=reference.kl)
    gap: MeanAndMax = (None, None)
    drift: MeanAndMax = (None, None)
    if policy is not None:
        batch = batch.with_columns(proximal_logprobs=policy.logprobs, values=policy.values)
        gap, drift = _gap_and_drift(policy, batch, version)
    if critic is not None:
        batch = batch.with_columns(values=critic.values)
    result = compute_advantages(algorithm, AdvantageInputs(batch, scores, kl_coef))
    logprobs = batch.behaviour_logprobs if policy is None else batch.proximal_logprobs
    assert logprobs is not None
    entropy = -np.bincount(batch.row_of_token, weights=logprobs, minlength=batch.num_rows)
    stats = BatchStats(
        kl=result.kl,
        non_score_reward=result.non_score_reward,
        entropy=entropy,
        gap_mean=gap[0],
        gap_max=gap[1],
        drift_mean=drift[0],
        drift_max=drift[1],
    )
    return stats, batch.with_columns(advantages=result.advantages, returns=result.returns)


def _gap_and_drift(
    policy: ForwardOutput, batch: TokenBatch, version: int | None
) -> tuple[MeanAndMax, MeanAndMax]:
    gaps = np.abs(policy.logprobs - batch.behaviour_logprobs)[batch.action_mask]
    fresh = np.ones(len(gaps), dtype=np.bool_)
    if version is not None and batch.policy_versions is not None:
        fresh = batch.policy_versions[batch.action_mask] >= version
    return _mean_and_max(gaps[fresh]), _mean_and_max(gaps[~fresh])


def _mean_and_max(values: np.ndarray) -> MeanAndMax:
    return (float(values.mean()), float(values.max())) if len(values) else (None, None)


@dataclass(frozen=True)
class SampleText:
    """One sampled completion, for a table."""

    prompt: str
    response: str


def sample_texts(*groups: TrajectoryGroup) -> list[SampleText]:
    """The first sample of each group."""
    return [SampleText(group.prompt.text, group.trajectories[0].response_text) for group in groups]
