"""The whole loop on fakes: it learns, every group is trained once, lag stays in bounds, resume is exact."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_cluster.config import RunConfig
from rl_cluster.data.stream import PromptStream
from rl_cluster.errors import NoSignalError, ScorerError
from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.loop.evaluation import Evaluator
from rl_cluster.loop.loop import TrainingLoop, Workers
from rl_cluster.loop.producer import Scoring
from rl_cluster.loop.state import LoopState, newest_checkpoint
from rl_cluster.rewards.failures import FailurePolicy
from rl_cluster.trajectory import SamplingSpec, ScoreFailure, Scores
from tests.fakes import (
    CountingScorer,
    FakeLearner,
    FakePublisher,
    FakeReference,
    FakeRolloutWorker,
    RecordingObserver,
    make_prompts,
)


def make_config(**sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run": {"steps": 6},
        "model": {"path": "unused"},
        "data": {"train": {"source": "addition"}},
        "rewards": {"scorers": [{"kind": "exact_match"}]},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 8},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunConfig.model_validate(values, strict=False)


class Rig:
    """A loop on fakes, and everything that a test looks at afterwards."""

    def __init__(self, config: RunConfig, folder: Path, **options: Any) -> None:
        self.workers = options.get("workers") or [FakeRolloutWorker()]
        self.scorer = options.get("scorer") or CountingScorer()
        self.learner = options.get("learner") or FakeLearner()
        self.critic = options.get("critic")
        self.observer = RecordingObserver()
        reference = None
        if config.algorithm.kl.coef > 0 and not options.get("learner_is_reference"):
            reference = FakeReference()
        pool = RolloutPool(self.workers, 60.0)
        scoring = Scoring([self.scorer], FailurePolicy.from_config(config.rewards))
        prompts = make_prompts(7)
        evaluator = Evaluator(prompts[:3], SamplingSpec(1.0, 3), config.eval, 0, pool, scoring)
        self.loop = TrainingLoop(
            config,
            Workers(
                pool,
                scoring,
                self.learner,
                FakePublisher(self.learner, self.workers),
                critic=self.critic,
                reference=reference,
                learner_is_reference=options.get("learner_is_reference", False),
                turns=options.get("turns"),
            ),
            PromptStream(prompts, seed=0),
            evaluator,
            self.observer,
            folder,
            options.get("resume"),
        )

    def run(self) -> None:
        asyncio.run(self.loop.run())


def test_the_loop_learns_and_reports_every_step(tmp_path: Path) -> None:
    rig = Rig(make_config(run={"steps": 15}, eval={"samples_per_prompt": 4}), tmp_path)
    rig.run()
    rows = rig.observer.rows
    assert sorted(rows) == list(range(16))
    assert rows[15]["eval/score_mean"] > rows[0]["eval/score_mean"] + 0.8
    assert rows[15]["episode"] == 15 * 32
    assert rows[1]["objective/scores"] == pytest.approx(rows[1]["rewards/ones"])
    assert len(rig.observer.tables[10]) == 4


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_every_group_is_trained_once_and_no_token_is_older_than_the_lag(tmp_path: Path, lag: int) -> None:
    slow = FakeRolloutWorker(delay=lambda task: 40 if task.group_id % 3 == 0 else 1)
    rig = Rig(make_config(**{"async": {"max_policy_lag": lag}}), tmp_path, workers=[slow])
    rig.run()
    assert sorted(rig.learner.trained_groups) == list(range(24))
    assert rig.loop.ledger.counts() == {"trained": 24}
    assert max(row["async/lag_max"] for step, row in rig.observer.rows.items() if step > 0) <= lag
    assert [task.group_id for task in slow.tasks if task.group_id >= 0] == list(range(24))


def test_with_lag_generation_goes_on_during_the_update(tmp_path: Path) -> None:
    rig = Rig(make_config(**{"async": {"max_policy_lag": 1}}), tmp_path)
    rig.run()
    assert max(row["async/lag_max"] for step, row in rig.observer.rows.items() if step > 0) == 1


class RecordedTurns:
    """Who has the GPUs, and in whose turn each update and each group came."""

    def __init__(self) -> None:
        self.holder, self.seen = "engines", []

    async def to_learner(self) -> None:
        self.holder = "learner"

    async def to_engines(self) -> None:
        self.holder = "engines"


def test_engines_on_the_learners_gpus_sleep_during_each_update_and_at_no_other_time(tmp_path: Path) -> None:
    turns = RecordedTurns()

    class Worker(FakeRolloutWorker):
        async def rollout(self, *args: Any) -> Any:
            turns.seen.append(("rollout", turns.holder))
            return await super().rollout(*args)

    class Learner(FakeLearner):
        async def optim_step(self, *args: Any) -> Any:
            turns.seen.append(("update", turns.holder))
            return await super().optim_step(*args)

    rig = Rig(make_config(run={"steps": 3}), tmp_path, workers=[Worker()], learner=Learner(), turns=turns)
    rig.run()
    assert set(turns.seen) == {("rollout", "engines"), ("update", "learner")}
    assert turns.seen.count(("update", "learner")) == 3 and turns.holder == "engines"


def test_a_synchronous_run_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    one = Rig(make_config(), tmp_path)
    two = Rig(make_config(), tmp_path, workers=[FakeRolloutWorker("a"), FakeRolloutWorker("b")])
    one.run()
    two.run()
    assert one.learner.weight == two.learner.weight
    assert min(len(worker.tasks) for worker in two.workers) > 0


@pytest.mark.parametrize("lag", [0, 2])
def test_resume_trains_what_was_left_and_nothing_twice(tmp_path: Path, lag: int) -> None:
    settings = {"async": {"max_policy_lag": lag}, "checkpoint": {"every": 3}}
    whole = Rig(make_config(**settings), tmp_path / "whole")
    whole.run()
    first = Rig(make_config(run={"steps": 3}, **settings), tmp_path / "half")
    first.run()
    folder = newest_checkpoint(tmp_path / "half" / "checkpoints")
    second = Rig(make_config(**settings), tmp_path / "half", resume=LoopState.read(folder))
    asyncio.run(second.learner.load(folder / "learner"))
    second.run()
    assert sorted(first.learner.trained_groups + second.learner.trained_groups) == list(range(24))
    if lag == 0:
        assert second.learner.weight == whole.learner.weight
        assert second.observer.rows[6]["objective/scores"] == whole.observer.rows[6]["objective/scores"]


def test_a_checkpoint_taken_in_mid_run_reissues_the_groups_under_way(tmp_path: Path) -> None:
    settings = {"async": {"max_policy_lag": 2}, "checkpoint": {"every": 3, "keep_last": 9}}
    whole = Rig(make_config(**settings), tmp_path)
    whole.run()
    state = LoopState.read(tmp_path / "checkpoints" / "step-3")
    assert state.reissue
    resumed = Rig(make_config(**settings), tmp_path / "again", resume=state)
    resumed.run()
    trained_before = [g for g, row in state.ledger.items() if row[0] == "trained"]
    assert sorted([int(g) for g in trained_before] + resumed.learner.trained_groups) == list(range(24))


def test_retention_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    config = make_config(checkpoint={"every": 1, "keep_last": 2}, eval={"every": 1})
    rig = Rig(config, tmp_path)
    rig.run()
    kept = {int(p.name.removeprefix("step-")) for p in (tmp_path / "checkpoints").glob("step-*")}
    scores = {s: row["eval/score_mean"] for s, row in rig.observer.rows.items() if s > 0}
    best = max(scores, key=lambda s: (scores[s], -s))
    assert kept == {5, 6, best}


def test_step_seconds_add_up_to_the_time_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock whose n-th reading is n²: every stretch between two readings has a length of its own."""
    readings: list[float] = []

    def clock() -> float:
        readings.append(float(len(readings) ** 2))
        return readings[-1]

    monkeypatch.setattr("rl_cluster.loop.loop.time", SimpleNamespace(perf_counter=clock))
    rig = Rig(make_config(run={"steps": 4}), tmp_path)
    rig.run()
    rows = [row for step, row in sorted(rig.observer.rows.items()) if step > 0]
    for row in rows:
        wait, train, sync = (row[f"perf/{name}_seconds"] for name in ("wait", "train", "sync"))
        assert 0 < wait < train < sync, "in this order, on a clock that runs ever faster"
        assert wait + train + sync <= row["perf/step_seconds"]
        assert row["eps"] == 32 / row["perf/step_seconds"]
    assert sum(row["perf/step_seconds"] for row in rows) == readings[-1] - readings[0]


def test_groups_without_signal_are_replaced_under_dynamic_sampling(tmp_path: Path) -> None:
    flat = CountingScorer(lambda g: Scores("ones", np.ones(8)) if 0 <= g < 5 else None)
    rig = Rig(make_config(batch={"dynamic_sampling": True}), tmp_path, scorer=flat)
    rig.run()
    dropped = [g for g in range(40) if g in rig.loop.ledger._entries and g not in rig.learner.trained_groups]
    assert set(range(5)) <= set(dropped)
    assert len(rig.learner.trained_groups) == 24
    assert rig.loop.ledger.entry(0).reason == "no signal: all scores of the group are equal"


def test_dynamic_sampling_gives_up_when_nothing_has_signal(tmp_path: Path) -> None:
    flat = CountingScorer(lambda g: Scores("ones", np.ones(8)) if g >= 0 else None)
    config = make_config(batch={"dynamic_sampling": True, "dynamic_sampling_limit": 2})
    with pytest.raises(NoSignalError, match="8 groups in a row"):
        Rig(config, tmp_path, scorer=flat).run()


def test_a_failed_score_is_retried_and_then_dropped_and_never_zero(tmp_path: Path) -> None:
    failure = ScoreFailure("ones", "raised", "boom")
    scorer = CountingScorer(lambda g: failure if g == 2 else None)
    rig = Rig(make_config(rewards={"max_retries": 2}), tmp_path, scorer=scorer)
    rig.run()
    assert scorer.calls.count(2) == 3
    assert 2 not in rig.learner.trained_groups
    assert rig.loop.ledger.entry(2).reason == "scorer ones raised: boom"
    assert rig.observer.rows[6]["failures/ones/raised"] == 1


def test_too_many_failed_scores_stop_the_run_with_the_traceback(tmp_path: Path) -> None:
    failure = ScoreFailure("ones", "raised", "boom", "Traceback: line 7")
    scorer = CountingScorer(lambda g: failure if g >= 0 else None)
    with pytest.raises(ScorerError, match="line 7"):
        Rig(make_config(run={"steps": 50}), tmp_path, scorer=scorer).run()


def test_a_worker_that_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    def explode(task: Any) -> int:
        if task.group_id == 9:
            raise RuntimeError("engine gone")
        return 1

    with pytest.raises(RuntimeError, match="engine gone"):
        Rig(make_config(), tmp_path, workers=[FakeRolloutWorker(delay=explode)]).run()


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, 0),
        ({"loss": {"kind": "reinforce"}, "kl": {"coef": 0.1}}, 0),
        ({"num_epochs": 2}, 6),
        ({"num_mini_batches": 2}, 6),
        ({"kl": {"coef": 0.1, "place": "reward_sequence", "estimator": "k1"}}, 6),
        ({"kl": {"coef": 0.1, "controller": "adaptive"}}, 6),
        ({"name": "ppo"}, 6),
    ],
)
def test_with_lag_the_policy_is_asked_before_the_update_only_where_its_answer_is_used(
    tmp_path: Path, settings: dict[str, Any], passes: int
) -> None:
    algorithm = {"name": "grpo", **settings}
    rig = Rig(make_config(algorithm=algorithm, **{"async": {"max_policy_lag": 1}}), tmp_path)
    rig.run()
    assert rig.learner.calls.count("forward") == passes
    assert rig.learner.calls.count("optim_step") >= 6


def test_mismatch_and_drift_are_told_apart_by_the_version_that_drew_a_token(tmp_path: Path) -> None:
    config = make_config(algorithm={"name": "grpo", "num_epochs": 2}, **{"async": {"max_policy_lag": 1}})
    rig = Rig(config, tmp_path)
    rig.run()
    rows = [rig.observer.rows[step] for step in range(1, 7)]
    assert rows[0]["health/logprob_gap_mean"] == pytest.approx(0.0, abs=1e-6)
    assert rows[0]["health/logprob_drift_mean"] is None
    for row in rows[1:]:
        # The fake's groups of these steps are all of the version before.
        assert row["async/lag_mean"] == 1.0 and row["health/logprob_gap_mean"] is None
        assert row["health/logprob_drift_max"] > row["health/logprob_drift_mean"] > 1e-3  # type: ignore[operator]


def test_ppo_values_and_reference_enter_the_metrics(tmp_path: Path) -> None:
    config = make_config(algorithm={"name": "ppo", "num_epochs": 2, "num_mini_batches": 2})
    rig = Rig(config, tmp_path)
    rig.run()
    assert rig.learner.calls[:3] == ["forward", "forward_backward", "optim_step"]
    assert rig.learner.calls.count("optim_step") == 6 * 4
    row = rig.observer.rows[6]
    assert row["objective/kl"] is not None
    expected = row["objective/scores"] + row["objective/non_score_reward"]
    assert row["objective/rlhf_reward"] == pytest.approx(expected)


def test_trajectories_are_written_with_their_advantages(tmp_path: Path) -> None:
    import pyarrow.parquet

    Rig(make_config(), tmp_path).run()
    table = pyarrow.parquet.read_table(tmp_path / "trajectories" / "step-3.parquet").to_pydict()
    assert len(table["tokens"]) == 32
    scores = np.array(table["score"]).reshape(4, 8)
    advantages = np.array([row[-1] for row in table["advantages"]]).reshape(4, 8)
    for group, advantage in zip(scores, advantages, strict=True):
        assert np.allclose(advantage, (group - group.mean()) / (group.std(ddof=1) + 1e-4), atol=1e-5)
