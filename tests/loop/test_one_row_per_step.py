"""metrics.jsonl has one line per step, whatever failed or died in between; and a failed publication loses
nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rl_cluster.errors import WeightSyncError
from rl_cluster.loop.checkpoints import Chosen, choose_checkpoint
from rl_cluster.loop.state import LoopState
from rl_cluster.metrics.sink import JsonLines
from rl_cluster.protocols import PublishReport
from rl_cluster.run_folder.folder import RunFolder
from tests.loop.test_loop import Rig, make_config


class FailingPublisher:
    """What it stands before fails at one version."""

    def __init__(self, publisher: Any, version: int) -> None:
        self._publisher, self._version = publisher, version

    async def publish(self, version: int) -> PublishReport:
        if version == self._version:
            raise WeightSyncError("an engine serves another version")
        report: PublishReport = await self._publisher.publish(version)
        return report


def newest(folder: Path) -> Chosen[LoopState]:
    return choose_checkpoint(folder / "checkpoints", LoopState.read)


def gone_on(config: Any, folder: Path) -> Rig:
    chosen = newest(folder)
    resumed = Rig(config, folder, resume=chosen.state)
    asyncio.run(resumed.learner.load(chosen.path / "learner"))
    resumed.run()
    return resumed


@pytest.mark.parametrize("lag", [0, 1])
def test_after_a_failed_publication_the_update_is_not_lost(tmp_path: Path, lag: int) -> None:
    config = make_config(**{"async": {"max_policy_lag": lag}})
    rig = Rig(config, tmp_path)
    # Workers are frozen; their publisher is replaced where it is used.
    object.__setattr__(
        rig.loop._workers, "publisher", FailingPublisher(rig.loop._workers.publisher, version=3)
    )
    with pytest.raises(WeightSyncError):
        rig.run()
    assert newest(tmp_path).state.step == 3
    assert rig.observer.rows[3]["perf/sync_seconds"] is None
    resumed = gone_on(config, tmp_path)
    last = config.run.steps
    assert sorted({*rig.observer.rows, *resumed.observer.rows}) == list(range(last + 1))
    assert sorted(resumed.learner.trained_groups + rig.learner.trained_groups) == list(range(4 * last))
    if lag == 0:
        whole = Rig(config, tmp_path / "whole")
        whole.run()
        assert resumed.learner.weight == whole.learner.weight
        assert resumed.loop.state() == whole.loop.state()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_comes_to_a_step_later_is_added_to_its_line(tmp_path: Path) -> None:
    with JsonLines(RunFolder(tmp_path)) as lines:
        lines.metrics(1, {"loss": 1.0})
        lines.metrics(2, {"loss": 2.0, "kl": float("nan")})
    with JsonLines(RunFolder(tmp_path), last_step=2) as lines:
        lines.metrics(2, {"eval/score_mean": 0.5})
        lines.metrics(3, {"loss": 3.0})
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    assert rows_of(tmp_path)[1].items() >= {"loss": 2.0, "kl": None, "eval/score_mean": 0.5}.items()


def test_a_run_that_dies_between_a_checkpoint_and_its_line_gets_the_line_back(tmp_path: Path) -> None:
    """As kill -9 during the evaluation after the checkpoint: the line was never written."""
    config = make_config(checkpoint={"every": 1, "keep_last": 9})
    Rig(config, tmp_path).run()
    said = json.loads((tmp_path / "checkpoints" / "step-2" / "metrics.json").read_text())
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 0}\n{"step": 1}\n')
    for _ in range(2):  # and not twice
        JsonLines(folder, last_step=2).close()
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2]
    assert rows_of(tmp_path)[2] == said
    assert said["objective/scores"] is not None and said["ledger/trained"] == 8
