"""The metrics of a step and of an evaluation, each number by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rl_cluster.config.run import EvalConfig
from rl_cluster.loop.buffer import ReadyGroup, StageTimes
from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.loop.evaluation import Evaluator
from rl_cluster.loop.experience import BatchStats
from rl_cluster.loop.producer import Scoring
from rl_cluster.loop.report import StepClock, step_metrics
from rl_cluster.loop.step import StepResult
from rl_cluster.loop.supervised import run_supervised
from rl_cluster.protocols import BatchLayout, OptimResult, PublishReport
from rl_cluster.rewards.failures import FailurePolicy
from rl_cluster.rewards.shaping import RunningMoments, ShapedScores
from rl_cluster.trajectory import GroupSummary, SamplingSpec, Scores
from tests.fakes import CountingScorer, FakeLearner, FakeRolloutWorker, make_prompts

NAN = float("nan")


def group(
    group_id: int,
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    times: StageTimes,
    *,
    min_version: int,
    eos: tuple[bool, ...],
    scores: Sequence[Scores],
    reference: Any = None,
) -> ReadyGroup:
    truncated = tuple(not ended for ended in eos)
    summary = GroupSummary(
        group_id, f"row {group_id}", lengths, counts, eos, truncated, min_version, 9, "rollout-0", 1.0
    )
    return ReadyGroup(summary, object(), reference, tuple(scores), times)


GROUPS = [
    group(
        0,
        (5, 7),
        (2, 4),
        StageTimes(10.0, 12.0, 15.0, 13.0),
        min_version=5,
        eos=(True, False),
        scores=[Scores("right", np.array([1.0, 0.0]), {"style": np.array([0.5, 0.7])})],
    ),
    group(
        1,
        (9, 4, 6),
        (6, 1, 3),
        StageTimes(9.0, 14.0, 15.5, 20.0),
        min_version=7,
        eos=(True, True, True),
        scores=[Scores("right", np.array([3.0, NAN, 3.0]), {"style": np.array([0.1, 0.2, 0.5])})],
    ),
]
RAW = np.array([1.0, 0.0, 3.0, NAN, 3.0])
SHAPED = ShapedScores(
    scores=RAW + np.array([0.5, 0.5, -1.0, 0.0, -1.0]),
    raw=RAW,
    parts={"length": np.array([0.5, 0.5, -1.0, NAN, -1.0])},
    moments=RunningMoments(),
)
STATS = BatchStats(
    kl=np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
    non_score_reward=np.array([-0.1, -0.2, -0.3, -0.4, -0.5]),
    entropy=np.array([2.0, 4.0, 6.0, 8.0, 10.0]),
    gap_mean=0.01,
    gap_max=0.02,
    drift_mean=0.3,
    drift_max=0.4,
)
SUMS = {
    "updates_sum": 2.0,
    "weight_total": 2.0,
    "rows_sum": 5.0,
    "tokens_sum": 16.0,
    "loss_sum": 0.8,
    "policy_loss_weighted": 0.6,
    "kl_weighted": 0.14,
    "value_loss_weighted": 5.0,
    "value_clipfrac_weighted": 0.9,
    "approxkl_weighted": 0.05,
    "clipfrac_weighted": 0.5,
    "entropy_weighted": 3.0,
    "importance_weight_weighted": 1.9,
    "importance_truncated_weighted": 0.4,
    "ratio_weighted": 2.4,
    "ratio_sq_weighted": 3.0,
}
OPTIM = (OptimResult(3, 0.1, 0.7), OptimResult(4, 0.2, 0.9, skipped=True))


def metrics_of(result: StepResult | None = None, groups: Sequence[ReadyGroup] = GROUPS) -> dict[str, Any]:
    layout = BatchLayout((5, 7, 9, 4, 6), (2, 4, 6, 1, 3), (0, 1, 2, 3, 4), (0, 0, 1, 1, 1))
    result = result or StepResult(layout, None, STATS, SUMS, {}, OPTIM)
    clock = StepClock(step=8.0, wait=1.0, train=4.0, sync=0.5)
    published = PublishReport(8, seconds=0.4, pause_seconds=0.25, num_bytes=1)
    return step_metrics(groups, SHAPED, result, clock, published, episode=55, version=8, kl_coef=0.3)


EXPECTED = {
    "objective/kl": 3.0,
    "objective/entropy": 6.0,
    "objective/non_score_reward": (-0.1 - 0.2 - 0.3 - 0.5) / 4,
    "objective/scores": 7.0 / 4,
    "objective/scores_std": float(np.sqrt((0.75**2 + 1.75**2 + 2 * 1.25**2) / 4)),
    "objective/shaping": -1.0 / 4,
    "objective/rlhf_reward": (7.0 - 1.0 - 1.1) / 4,
    "objective/kl_coef": 0.3,
    "shaping/length": -1.0 / 4,
    "completions/without_reward_fraction": 1 / 5,
    "policy/approxkl_avg": 0.025,
    "policy/clipfrac_avg": 0.25,
    "policy/entropy_avg": 1.5,
    "policy/importance_weight_avg": 0.95,
    "policy/importance_truncated_avg": 0.2,
    "loss/policy_avg": 0.3,
    "loss/kl_avg": 0.07,
    "loss/value_avg": 2.5,
    "loss/total_avg": 0.4,
    "val/clipfrac_avg": 0.45,
    "val/ratio": 1.2,
    "val/ratio_var": 1.5 - 1.44,
    "lr": 0.2,
    "optim/grad_norm": 0.9,
    "optim/skipped_updates": 1.0,
    "health/logprob_gap_mean": 0.01,
    "health/logprob_gap_max": 0.02,
    "health/logprob_drift_mean": 0.3,
    "health/logprob_drift_max": 0.4,
    "val/num_eos_tokens": 4.0,
    "completions/truncated_fraction": 1 / 5,
    "completions/mean_length": 16 / 5,
    "completions/max_length": 6.0,
    "rewards/right": 7.0 / 4,
    "rewards/right/style": 2.0 / 5,
    "perf/step_seconds": 8.0,
    "perf/wait_seconds": 1.0,
    "perf/train_seconds": 4.0,
    "perf/sync_seconds": 0.5,
    "perf/sync_pause_seconds": 0.25,
    "perf/generate_seconds": 14.0 - 9.0,
    "perf/score_seconds": 3.0,
    "perf/reference_seconds": 0.0,
    "perf/generated_tokens_per_second": 16 / 5.0,
    "perf/trained_tokens_per_second": 31 / 4.0,
    "async/lag_mean": (3 + 1) / 2,
    "async/lag_max": 3.0,
    "groups/without_signal": 1.0,
    "episode": 55.0,
    "eps": 5 / 8.0,
}


def test_every_metric_of_a_step_is_the_number_found_by_hand() -> None:
    found = metrics_of()
    for name, expected in EXPECTED.items():
        assert found[name] == pytest.approx(expected), name


def test_no_metric_of_a_step_is_without_an_expectation() -> None:
    assert set(metrics_of()) == set(EXPECTED)


def test_a_separate_critics_losses_are_its_own() -> None:
    own = {
        "updates_sum": 4.0,
        "weight_total": 4.0,
        "value_loss_weighted": 2.0,
        "value_clipfrac_weighted": 1.0,
    }
    layout = BatchLayout((5,), (2,), (0,), (0,))
    found = metrics_of(StepResult(layout, None, STATS, SUMS, own, OPTIM))
    assert (found["loss/value_avg"], found["val/clipfrac_avg"]) == (0.5, 0.25)
    assert found["loss/policy_avg"] == pytest.approx(0.3)


def test_what_nobody_measured_is_none_and_not_zero() -> None:
    layout = BatchLayout((5,), (2,), (0,), (0,))
    bare = BatchStats(None, np.zeros(5), np.zeros(5), None, None)
    found = metrics_of(StepResult(layout, None, bare, {}, {}, ()))
    empty = ["objective/kl", "lr", "optim/grad_norm", "loss/policy_avg", "loss/value_avg", "val/ratio"]
    empty += ["val/ratio_var", "policy/entropy_avg", "health/logprob_gap_mean", "health/logprob_drift_max"]
    assert {name: found[name] for name in empty} == dict.fromkeys(empty)
    assert found["optim/skipped_updates"] == 0.0


def test_the_reference_takes_time_only_where_there_is_one() -> None:
    with_one = [GROUPS[0], ReadyGroup(**{**vars(GROUPS[1]), "reference": object()})]
    assert metrics_of(groups=with_one)["perf/reference_seconds"] == 6.0


class Listed(CountingScorer):
    """Scores by group id: the evaluation's groups are −1, −2, …"""

    def __init__(self, scores: dict[int, list[float]]) -> None:
        super().__init__(lambda group_id: Scores("ones", np.array(scores[group_id])))


def test_an_evaluation_is_means_over_samples_and_pass_at_k_over_prompts() -> None:
    """3 prompts of 4 samples. pass@k: 1 − C(n − c, k) / C(n, k) with c of n samples at the threshold."""
    scorer = Listed({-1: [1.0, 0.0, 0.5, 0.0], -2: [2.0, 1.0, 0.9, 0.8], -3: [0.0, 0.0, 0.0, 0.0]})
    worker = FakeRolloutWorker()
    config = EvalConfig(num_prompts=3, samples_per_prompt=4, pass_at=(1, 2, 4), success_threshold=0.9)
    scoring = Scoring([scorer], FailurePolicy(max_retries=0, max_fraction=0.1))
    pool = RolloutPool([worker], 60.0)
    evaluator = Evaluator(make_prompts(5), SamplingSpec(0.0, 3), config, 7, pool, scoring)
    metrics = asyncio.run(evaluator.run()).metrics
    assert metrics["eval/score_mean"] == pytest.approx(6.2 / 12)
    assert metrics["eval/accuracy"] == pytest.approx(4 / 12)
    assert metrics["eval/mean_length"] == 3.0
    assert metrics["eval/pass@1"] == pytest.approx((1 / 4 + 3 / 4 + 0) / 3)
    assert metrics["eval/pass@2"] == pytest.approx((3 / 6 + 1 + 0) / 3)
    assert metrics["eval/pass@4"] == pytest.approx((1 + 1 + 0) / 3)
    assert [task.group_id for task in worker.tasks] == [-1, -2, -3]
    assert all(task.sampling == SamplingSpec(0.0, 3) for task in worker.tasks)
    seeds = [task.seeds for task in worker.tasks]
    assert len({seed for row in seeds for seed in row}) == 12
    asyncio.run(evaluator.run())
    assert [task.seeds for task in worker.tasks[3:]] == seeds, "every evaluation asks the same"


@pytest.mark.filterwarnings("ignore:All reward functions returned None")
def test_samples_without_a_reward_count_in_no_mean_of_an_evaluation() -> None:
    scorer = Listed({-1: [1.0, NAN], -2: [NAN, NAN]})
    config = EvalConfig(num_prompts=2, samples_per_prompt=2, pass_at=(1, 2))
    scoring = Scoring([scorer], FailurePolicy(max_retries=0, max_fraction=0.1))
    pool = RolloutPool([FakeRolloutWorker()], 60.0)
    metrics = asyncio.run(
        Evaluator(make_prompts(2), SamplingSpec(0.0, 3), config, 0, pool, scoring).run()
    ).metrics
    assert (metrics["eval/score_mean"], metrics["eval/accuracy"]) == (1.0, 1.0)
    assert (metrics["eval/pass@1"], metrics["eval/pass@2"]) == (1.0, None)


async def test_a_supervised_run_reports_nats_per_token_of_each_batch() -> None:
    class Learner(FakeLearner):
        async def forward_backward(self, batch: Any, layout: Any, rows: Any, loss: Any) -> Any:
            self.calls.append("forward_backward")
            assert list(rows) == list(range(batch.num_rows))
            return {"nll_sum": 6.0 * len(self.calls), "tokens_sum": 4.0}, None

    from tests.learners.learner_cases import make_batch

    seen: list[tuple[int, float, float]] = []
    learner = Learner()
    batches = [make_batch(3), make_batch(4)]
    await run_supervised(learner, batches, lambda step, loss, result: seen.append((step, loss, result.step)))
    assert seen == [(1, 1.5, 1), (2, 4.5, 2)]
    assert learner.calls == ["forward_backward", "optim_step"] * 2
