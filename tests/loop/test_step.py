"""One step on a real learner in this process, from groups drawn by other weights than those of now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learners.spec import LearnerSpec
from learners.start import start_local_learner
from learners.whole_weights import whole_weights
from rl_cluster.config import RunConfig
from rl_cluster.loop.buffer import ReadyGroup, StageTimes
from rl_cluster.loop.report import StepClock, step_metrics
from rl_cluster.loop.step import TrainStep
from rl_cluster.protocols import PublishReport
from rl_cluster.rewards.shaping import RunningMoments, ShapedScores
from rl_cluster.trajectory import Prompt, Trajectory, TrajectoryGroup
from tests.learners.learner_cases import OPTIMIZER, make_model

TIMES = StageTimes(0.0, 1.0, 2.0, 2.0)


def a_group(group_id: int, version: int, generator: np.random.Generator) -> TrajectoryGroup:
    prompt = Prompt(f"row {group_id}", np.array([3, 4 + group_id], dtype=np.int32), "prompt")

    def one(length: int) -> Trajectory:
        tokens = np.concatenate([prompt.tokens, generator.integers(3, 20, length)]).astype(np.int32)
        drawn = np.arange(len(tokens)) >= 2
        logprobs = np.where(drawn, -3 + 0.3 * generator.normal(size=len(tokens)), 0).astype(np.float32)
        versions = np.where(drawn, version, -1).astype(np.int32)
        return Trajectory(tokens, drawn, logprobs, versions, "stop", "text", True)

    return TrajectoryGroup(group_id, prompt, tuple(one(length) for length in (3, 7, 5)))


def config_of(**algorithm: Any) -> RunConfig:
    values = {
        "model": {"path": "unused"},
        "data": {"train": {"source": "addition"}},
        "rewards": {"scorers": [{"kind": "exact_match"}]},
        "algorithm": {"name": "grpo", **algorithm},
        "async": {"max_policy_lag": 1, "importance_cap": 1.1},
    }
    return RunConfig.model_validate(values, strict=False)


async def step_on(
    model_path: str, config: RunConfig, pass_before: bool
) -> tuple[dict[str, torch.Tensor], dict[str, float | None], bool]:
    """Weights and metrics after two steps on recorded groups of the version before; and whether the present
    policy was asked before the update."""
    learner = start_local_learner(
        LearnerSpec(model_path, engine="torch", optimizer=OPTIMIZER, total_steps=4, temperature=1.0)
    )
    step = TrainStep(config, learner, None, learner_is_reference=False)
    asked = step._needs_pass_before
    step._needs_pass_before, step._stats_are_behaviours = pass_before, not pass_before
    generator = np.random.default_rng(7)
    for number in (1, 2):
        groups = [a_group(4 * number + i, max(number - 2, 0), generator) for i in range(4)]
        summaries = [group.summary("rollout-0", 1.0) for group in groups]
        ready = [ReadyGroup(s, g, None, (), TIMES) for s, g in zip(summaries, groups, strict=True)]
        scores = generator.normal(size=12)
        result = await step.run(ready, scores, 0.0, number)
    shaped = ShapedScores(scores, scores, {}, RunningMoments())
    report = PublishReport(2, 0.0, 0.0, 0)
    metrics = step_metrics(ready, shaped, result, StepClock(1, 0, 1, 0), report, 24, 1, 0.0)
    return (await learner.apply(whole_weights))[0], metrics, asked


@pytest.mark.parametrize(
    "loss",
    [{}, {"ratio": "sequence", "aggregation": "sequence_mean"}, {"kind": "cispo"}, {"kind": "reinforce"}],
)
async def test_with_one_update_the_pass_before_it_changes_no_weight_and_no_metric(
    tmp_path: Path, loss: dict[str, Any]
) -> None:
    path, config = make_model(tmp_path / "tiny"), config_of(loss=loss)
    weights, metrics, asked = await step_on(path, config, pass_before=False)
    expected, with_pass, _ = await step_on(path, config, pass_before=True)
    assert not asked
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)
    known = {name for name, value in metrics.items() if value is not None}
    assert known == {name for name, value in with_pass.items() if value is not None}
    for name in known:
        assert metrics[name] == pytest.approx(with_pass[name], rel=1e-4, abs=1e-6), name
    assert metrics["health/logprob_drift_mean"] > 0.1  # type: ignore[operator]
