"""A run is gone on with: which checkpoint, with which settings, and what is recorded of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rl_cluster.assembly.starts import going_on
from rl_cluster.assembly.train import train
from rl_cluster.cli.commands import train_command
from rl_cluster.cli.failures import LoggedFailure, describe_failure
from rl_cluster.config.reading.changes import changes
from rl_cluster.config.reading.load import dump_config, load_config
from rl_cluster.errors import BadInputError
from rl_cluster.loop.checkpoints import checkpoint_steps
from rl_cluster.loop.state import LoopState
from rl_cluster.run_folder.folder import RunFolder
from tests.assembly.local_runs import checked, run, settings

FEW = settings(
    run={"steps": 3},
    eval={"num_prompts": 2},
    checkpoint={"every": 1, "keep_last": 9},
    log={"trajectories": False},
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint of each; tests work on copies."""
    folder = tmp_path_factory.mktemp("done") / "run"
    run(folder, FEW)
    return folder


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "run"))


def rows(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in RunFolder(folder).read_metrics()}


def resume(folder: Path, *overrides: str, **options: Any) -> None:
    train_command(None, list(overrides), options.pop("dry_run", False), folder, **options)


def test_an_override_acts_and_is_recorded(copy: Path) -> None:
    before = load_config(copy / "config.yaml")
    resume(copy, "run.steps=4", "optimizer.learning_rate=0.5")
    assert rows(copy)[4]["lr"] == 0.5
    now = load_config(copy / "config.yaml")
    assert now.optimizer.learning_rate == 0.5
    assert now.run.steps == 4
    assert load_config(copy / "starts" / "start-1.yaml") == before
    assert load_config(copy / "starts" / "start-2.yaml") == now
    (start,) = [json.loads(line) for line in (copy / "starts" / "starts.jsonl").read_text().splitlines()]
    assert start["step"] == 3
    assert start["changes"]["optimizer.learning_rate"] == [1e-3, 0.5]
    resume(copy, "run.steps=5")
    assert rows(copy)[5]["lr"] == 0.5, "and the next start goes on with it"
    assert sorted(path.name for path in (copy / "starts").glob("*.yaml")) == [
        "start-1.yaml",
        "start-2.yaml",
        "start-3.yaml",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.name=rloo",
        "algorithm.loss.clip_low=0.1",
        "batch.prompts_per_step=2",
        "batch.samples_per_prompt=2",
        "model.path=.",
        "model.lora={rank: 2}",
        "model.dtype=bfloat16",
        "data.train.num_digits=1",
        "data.held_out=3",
        "run.seed=4",
        "rollout.temperature=0.5",
        "rollout.max_new_tokens=5",
        "rewards.scorers.0.weight=2",
        "optimizer.schedule=linear",
        "optimizer.weight_decay=0.1",
        "async.max_policy_lag=1",
        "cluster.backend=ray",
        "learner.zero_stage=0",
    ],
)
def test_what_changes_the_meaning_is_refused_by_name_and_touches_nothing(done: Path, override: str) -> None:
    before = {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}
    name = override.partition("=")[0]
    with pytest.raises(BadInputError) as caught:
        resume(done, "run.steps=5", override)
    assert name in str(caught.value)
    assert "--force-changes" in str(caught.value)
    with pytest.raises(BadInputError):
        resume(done, "run.steps=5", override, dry_run=True)
    assert before == {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "override",
    ["eval.every=1", "log.num_samples=2", "checkpoint.keep_last=1", "cluster.cpus_per_worker=2"],
)
def test_what_does_not_is_allowed(done: Path, override: str) -> None:
    resume(done, "run.steps=5", override, dry_run=True)


def test_asked_for_they_act_and_are_recorded(copy: Path) -> None:
    resume(copy, "run.steps=4", "algorithm.loss.clip_low=0.1", "rollout.temperature=0.7", force_changes=True)
    now = load_config(copy / "config.yaml")
    assert (now.algorithm.loss.clip_low, now.rollout.temperature) == (0.1, 0.7)
    start = json.loads((copy / "starts" / "starts.jsonl").read_text())
    assert set(start["changes"]) == {"run.steps", "algorithm.loss.clip_low", "rollout.temperature"}


@pytest.mark.parametrize("steps", [1, 2])
def test_an_end_before_the_checkpoint_is_refused(done: Path, steps: int) -> None:
    with pytest.raises(BadInputError, match=rf"run\.steps = {steps}: the checkpoint is of step 3"):
        resume(done, f"run.steps={steps}")


def test_an_exact_step_is_gone_on_from_and_later_ones_are_kept_aside(copy: Path) -> None:
    whole = rows(copy)
    resume(copy, step=1)
    again = rows(copy)
    assert sorted(again) == [0, 1, 2, 3]
    for name in ("objective/scores", "loss/policy_avg", "eval/score_mean"):
        assert again[3].get(name) == whole[3].get(name), "to the bit"
    assert checkpoint_steps(copy / "checkpoints") == [1, 2, 3]
    assert checkpoint_steps(copy / "checkpoints" / "set-aside") == [2, 3]
    with pytest.raises(BadInputError, match=r"of the steps: 1, 2, 3"):
        resume(copy, step=7)
    with pytest.raises(BadInputError, match="only with --resume"):
        train_command("x.yaml", [], False, None, step=3)
    with pytest.raises(BadInputError, match="only with --resume"):
        train_command("x.yaml", [], False, None, force_changes=True)
    with pytest.raises(BadInputError, match="--step -1"):
        resume(copy, step=-1)


def test_a_damaged_newest_checkpoint_is_passed_over_and_the_run_ends_the_same(copy: Path) -> None:
    whole = rows(copy)
    file = copy / "checkpoints" / "step-3" / "learner" / "rank-0.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    data[len(data) // 2 + 1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.warns(UserWarning, match=r"step-3 is damaged \(learner/rank-0.pt has changed"):
        resume(copy)
    assert rows(copy)[3]["loss/policy_avg"] == whole[3]["loss/policy_avg"]
    assert "step-3 is damaged" in (copy / "logs" / "run.log").read_text()
    for step in (1, 2):
        shutil.rmtree(copy / "checkpoints" / f"step-{step}" / "learner")
    (copy / "checkpoints" / "step-3" / "loop.json").write_text("{}")
    with pytest.raises(LoggedFailure) as caught:
        resume(copy)
    words = describe_failure(caught.value)
    assert words.startswith("CheckpointError: no checkpoint in")
    assert all(f"step-{step}: " in words for step in (1, 2, 3))


def test_other_data_are_refused_before_anything_starts(copy: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("rl_cluster.assembly.train.open_run", lambda *_: pytest.fail("workers were started"))
    config, plan = checked(copy, {**FEW, "data": {**FEW["data"], "held_out": 21}})
    with pytest.raises(BadInputError, match="prompt stream"):
        train(config, plan, copy, force_changes=True)


def test_changes_are_named_down_to_entries_of_lists(done: Path) -> None:
    before = load_config(done / "config.yaml")
    now = load_config(done / "config.yaml", ["rewards.scorers.0.weight=3.0", "run.steps=9"])
    assert changes(before, now) == {"rewards.scorers.0.weight": (1.0, 3.0), "run.steps": (3, 9)}
    assert changes(before, before) == {}
    assert dump_config(before) == (done / "config.yaml").read_text()
    chosen = going_on(RunFolder(done), before, LoopState.read)
    assert (chosen.state.step, chosen.changes) == (3, {})
