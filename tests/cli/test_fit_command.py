"""`fit` on the command line: what --dry-run shows, a run and its continuation, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_cluster.cli.fit import fit_command
from rl_cluster.errors import BadInputError

SMALL = [
    "model.scratch={hidden_size: 32, num_heads: 2, intermediate_size: 32, num_layers: 1, max_positions: 16}",
    "cluster={backend: local, device: cpu, cpus_per_worker: 1}",
    "log={progress: none, tensorboard: false}",
    "run.epochs=1",
    "data.held_out=380",
    "eval.at_start=false",
    "batch.rows_per_step=10",
    "checkpoint.every=1",
]
RECIPE = str(Path(__file__).parents[2] / "configs" / "dpo.yaml")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


def test_dry_run_shows_the_plan_and_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    fit_command(RECIPE, [*SMALL, f"run.dir={folder}", "objective.beta=0.3"], dry_run=True, resume=None)
    shown = capsys.readouterr().out
    assert "beta: 0.3" in shown
    assert "learner-0" in shown
    assert "16 tokens" in shown
    assert not folder.exists()


def test_a_run_goes_on_for_more_epochs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit_command(RECIPE, [*SMALL, f"run.dir={folder}"], dry_run=False, resume=None)
    fit_command(None, ["run.epochs=2"], dry_run=False, resume=folder)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    with pytest.raises(BadInputError, match="is not empty"):
        fit_command(RECIPE, [*SMALL, f"run.dir={folder}"], dry_run=False, resume=None)
    with pytest.raises(BadInputError, match="leave the recipe out"):
        fit_command(RECIPE, [], dry_run=False, resume=folder)
    with pytest.raises(BadInputError, match="goes on in its own folder"):
        fit_command(None, ["run.dir=elsewhere"], dry_run=False, resume=folder)


def test_a_model_that_cannot_be_trained_leaves_no_folder(tmp_path: Path) -> None:
    words = [*SMALL, f"run.dir={tmp_path / 'run'}", "model.lora={targets: [nothing_so_called]}"]
    with pytest.raises(BadInputError, match=r"model\.lora\.targets"):
        fit_command(RECIPE, words, dry_run=False, resume=None)
    assert not (tmp_path / "run").exists()


def test_a_recipe_or_a_run_must_be_given() -> None:
    with pytest.raises(BadInputError, match="give a recipe"):
        fit_command(None, [], dry_run=False, resume=None)
