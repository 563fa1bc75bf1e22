"""Alarms: an engine that disagrees ends the run; no signal and a collapse are told of in time."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_cluster.errors import HealthError
from rl_cluster.loop.health import Alarm, HealthMonitor
from rl_cluster.trajectory import GroupTask, Prompt, Scores, Trajectory
from tests.fakes import CountingScorer, FakeRolloutWorker
from tests.loop.test_loop import Rig, make_config

GAP = "health/logprob_gap_mean"


class Disagreeing(FakeRolloutWorker):
    """An engine whose log-probabilities are off by `gap` nats."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.gap = gap

    def _sample(self, prompt: Prompt, seed: int) -> Trajectory:
        sample = super()._sample(prompt, seed)
        sample.behaviour_logprobs[sample.action_mask] += np.float32(self.gap)
        return sample


def asking(**sections: Any) -> Any:
    """Two epochs, so that the fake learner's forward pass measures the gap."""
    return make_config(algorithm={"name": "grpo", "num_epochs": 2}, **sections)


def alarms_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [1, 6])
def test_three_nats_between_engine_and_learner_are_warned_of_and_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, steps: int
) -> None:
    config = asking(run={"steps": steps}, model={"dtype": dtype}, checkpoint={"every": 1})
    rig = Rig(config, tmp_path, workers=[Disagreeing(3.0)])
    with pytest.raises(HealthError, match=r"step 1: health/logprob_gap_mean is 3 nats, above health\.max_lo"):
        rig.run()
    assert "health/logprob_gap_mean is 3 nats" in caplog.text
    assert rig.observer.rows[1][GAP] == pytest.approx(3.0) and rig.observer.rows[1]["health/alarms"] >= 1
    assert alarms_of(tmp_path)[0]["fatal"]
    assert not list((tmp_path / "checkpoints").glob("step-*")), "a checkpoint of rubbish"


@pytest.mark.parametrize(("limit", "end"), [(None, 2), (0.05, 2), (0.2, None)])
def test_a_smaller_gap_warns_first_and_ends_the_run_at_the_second_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: float | None, end: int | None
) -> None:
    rig = Rig(asking(health={"max_logprob_gap": limit}), tmp_path, workers=[Disagreeing(0.1)])
    if end is None:
        rig.run()
        assert "logprob_gap" not in caplog.text
        return
    with pytest.raises(HealthError, match="step 2"):
        rig.run()
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING and GAP in r.message]
    assert "step 1" in warnings[0] and "A second step like this ends the run" in warnings[0]


def test_one_step_above_the_limit_between_good_ones_does_not_end_the_run() -> None:
    monitor = HealthMonitor(make_config())
    found = [monitor.check(step, {GAP: gap}, 4) for step, gap in enumerate([0.1, 0.01, 0.1, 0.0, 0.1])]
    assert [len(alarms) for alarms in found] == [1, 0, 1, 0, 1]
    assert not any(alarm.fatal for alarms in found for alarm in alarms)


def test_under_lag_three_nats_of_drift_end_the_run_too(tmp_path: Path) -> None:
    config = asking(**{"async": {"max_policy_lag": 1}})
    with pytest.raises(HealthError, match="health/logprob_gap_mean is 3 nats"):
        Rig(config, tmp_path / "fresh", workers=[Disagreeing(3.0)]).run()
    late = Disagreeing(0.0)

    def later(task: GroupTask) -> int:
        late.gap = 3.0 if task.group_id >= 8 else 0.0
        return 1

    late._delay = later
    with pytest.raises(HealthError, match="health/logprob_drift_mean is"):
        Rig(config, tmp_path / "drift", workers=[late]).run()


@pytest.mark.parametrize(
    "algorithm", [{"name": "grpo"}, {"name": "rloo"}, {"name": "reinforce"}, {"name": "ppo"}]
)
def test_equal_rewards_are_counted_and_told_of_at_the_second_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: dict[str, Any]
) -> None:
    scorer = CountingScorer(lambda _: Scores("ones", np.full(8, 0.5)))
    Rig(make_config(algorithm=algorithm), tmp_path, scorer=scorer).run()
    told = [record.message for record in caplog.records if "groups/without_signal" in record.message]
    assert [int(m.split("step ")[1].split(":")[0]) for m in told] == [2, 4]
    assert "check the reward" in told[0] and "mean 0.5" in told[0]
    assert alarms_of(tmp_path)[0]["step"] == 2


def test_the_metric_counts_the_groups_whose_scores_are_equal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = CountingScorer(lambda g: Scores("ones", np.full(8, float(g))) if g % 4 != 0 else None)
    rig = Rig(make_config(), tmp_path, scorer=scorer)
    rig.run()
    assert [rig.observer.rows[step]["groups/without_signal"] for step in range(1, 7)] == [3.0] * 6
    assert "without_signal" not in caplog.text


def test_no_signal_can_be_silenced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scorer = CountingScorer(lambda _: Scores("ones", np.zeros(8)))
    Rig(make_config(health={"no_signal_steps": 0}), tmp_path, scorer=scorer).run()
    assert "without_signal" not in caplog.text


def feed(values: dict[str, list[float]], **health: Any) -> dict[int, list[Alarm]]:
    monitor = HealthMonitor(make_config(health=health))
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    found = {step: monitor.check(step, row, 4) for step, row in enumerate(rows, 1)}
    return {step: alarms for step, alarms in found.items() if alarms}


FALLING = [2.0] * 5 + [1.0] * 3 + [0.1] * 12


@pytest.mark.parametrize(
    ("metric", "remedy"),
    [
        ("policy/entropy_avg", "entropy_coef"),
        ("completions/mean_length", "kl.coef"),
        ("objective/scores_std", "samples_per_prompt"),
    ],
)
def test_a_collapse_names_the_metric_its_trend_and_the_remedy_once(metric: str, remedy: str) -> None:
    other = {"objective/scores": [0.01 * i for i in range(20)]}
    found = feed({metric: FALLING, **other})
    # The mean of the last five falls to 0.4 with the twelfth step: (1 + 4 * 0.1) / 5 = 0.28.
    assert list(found) == [12]
    (alarm,) = found[12]
    assert alarm.metric == metric and not alarm.fatal
    assert "from 2 (first 5 steps) to 0.28 (last 5)" in alarm.message and remedy in alarm.message
    assert not feed({metric: FALLING, **other}, collapse_window=0)
    assert not feed({metric: FALLING, **other}, collapse_ratio=0.01)


def test_a_reward_that_no_longer_moves_is_told_of_and_a_noisy_one_is_not() -> None:
    deviations = [0.4] * 20
    flat = feed({"objective/scores": [0.1, 0.2, 0.3] + [0.5] * 17, "objective/scores_std": deviations})
    assert list(flat) == [13] and "flat at 0.5 for 10 steps" in flat[13][0].message
    noisy = [0.5 + 0.01 * (-1) ** i for i in range(20)]
    assert not feed({"objective/scores": noisy, "objective/scores_std": deviations})


def test_a_healthy_run_raises_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(make_config(run={"steps": 8}), tmp_path)
    rig.run()
    assert not caplog.records and not (tmp_path / "alarms.jsonl").exists()
    assert all(row["health/alarms"] == 0 for step, row in rig.observer.rows.items() if step > 0)
