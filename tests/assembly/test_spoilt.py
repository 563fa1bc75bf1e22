"""Weights that are not finite, on the local backend with a real model: named, not saved, not exported."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from learners.rank import LearnerRank
from rl_cluster.assembly.fit import fit
from rl_cluster.cli.commands import train_command
from rl_cluster.config.run import OptimizerConfig
from rl_cluster.errors import BadInputError, CheckpointError, NonFiniteError, PipelineError
from rl_cluster.forward_backward import ForwardBackwardPipeline
from rl_cluster.loop.checkpoints import checkpoint_steps, choose_checkpoint
from rl_cluster.loop.state import LoopState
from rl_cluster.modeling.drawing import draw
from rl_cluster.protocols import OptimParams
from rl_cluster.run_folder.folder import RunFolder
from tests.assembly.local_runs import run, settings
from tests.assembly.test_fit_local import ROWS
from tests.assembly.test_fit_local import settings as fit_settings


def wild(**sections: Any) -> dict[str, Any]:
    return settings(optimizer={"learning_rate": 1e30}, eval={"num_prompts": 2}, **sections)


def test_a_learning_rate_of_1e30_ends_a_run_and_the_good_checkpoint_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    good = settings(run={"steps": 2}, checkpoint={"every": 1, "keep_last": 1}, eval={"num_prompts": 2})
    run(folder, good)
    with pytest.raises(Exception) as caught:  # noqa: PT011 — the log's wrapper around it
        train_command(None, ["run.steps=20", "optimizer.learning_rate=1e30"], False, folder)
    assert isinstance(caught.value.__cause__, NonFiniteError), caught.value.__cause__
    assert checkpoint_steps(folder / "checkpoints") == [2]
    assert choose_checkpoint(folder / "checkpoints", LoopState.read).state.step == 2


@pytest.mark.parametrize("steps", [1, 12])
def test_nothing_is_exported_of_a_run_that_is_spoilt(tmp_path: Path, steps: int) -> None:
    with pytest.raises(NonFiniteError):
        run(tmp_path / "run", wild(run={"steps": steps}))
    assert not (tmp_path / "run" / "model").exists()
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize(("name", "steps"), [("sft", 1), ("sft", 20), ("dpo", 20), ("reward", 20)])
def test_nor_of_a_fit(tmp_path: Path, name: str, steps: int) -> None:
    config = fit_settings(
        name,
        tmp_path / "run",
        run={"dir": str(tmp_path / "run"), "steps": steps},
        optimizer={"learning_rate": 1e30},
        checkpoint={"every": 1},
    )
    with pytest.raises(NonFiniteError):
        fit(config, rows=ROWS[name])
    assert not (tmp_path / "run" / "model").exists()
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), None])
def test_sampling_from_logits_that_are_not_finite_is_an_error_with_a_name(
    temperature: float, spoilt: float | None
) -> None:
    logits = torch.zeros(3, 5)
    logits[1] = -torch.inf if spoilt is None else logits[1]
    if spoilt is not None:
        logits[1, 2] = spoilt
    noise = torch.full((3,), 0.5, dtype=torch.float64)
    with pytest.raises(NonFiniteError, match=r"not finite \(NaN or infinity\) for 1 of 3 sequences"):
        draw(logits, noise, temperature, -1, 1.0)
    logits[1] = torch.tensor([0.0, -torch.inf, -torch.inf, 0.0, 0.0])
    tokens, logprobs = draw(logits, noise, temperature, 2, 0.9)
    assert logprobs.isfinite().all(), "tokens that may not be drawn are no fault"
    del tokens


def rank(tmp_path: Path) -> LearnerRank:
    from learners.spec import LearnerSpec
    from rl_cluster.config.run import ScratchModel
    from rl_cluster.modeling.scratch import save_scratch_model

    save_scratch_model(ScratchModel(hidden_size=32, num_layers=1, num_heads=2), tmp_path / "m", 0)
    spec = LearnerSpec(
        model_path=str(tmp_path / "m"),
        tokens_per_micro_batch=64,
        total_steps=2,
        optimizer=OptimizerConfig(),
        engine="torch",
        device="cpu",
    )
    return LearnerRank(spec)


def test_a_learner_saves_and_exports_only_what_is_finite(tmp_path: Path) -> None:
    learner = rank(tmp_path)
    learner.save(tmp_path / "good")
    parameter = next(p for p in learner.model.parameters() if p.dim() == 2)
    with torch.no_grad():
        parameter[0, 0] = torch.nan
    with pytest.raises(NonFiniteError):
        learner.save(tmp_path / "bad")
    with pytest.raises(NonFiniteError):
        learner.export(tmp_path / "model")
    with torch.no_grad():
        for one in learner.model.parameters():
            one.fill_(1e30)
    with pytest.raises(NonFiniteError, match="gives for a few tokens is not finite"):
        learner.save(tmp_path / "huge")
    assert not (tmp_path / "bad").exists() and not (tmp_path / "huge").exists()


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_a_learning_rate_that_is_no_number_is_refused(tmp_path: Path, rate: float) -> None:
    learner = rank(tmp_path)
    learner._pending_backwards = 1
    before = [p.detach().clone() for p in learner.model.parameters()]
    with pytest.raises(BadInputError, match="learning rate"):
        learner.optim_step(OptimParams(learning_rate=rate))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


RECIPE_STEPS = 100_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_that_the_run_goes_on_from(tmp_path: Path, number: int) -> None:
    values = settings(
        run={"steps": RECIPE_STEPS, "dir": str(tmp_path / "run")},
        eval={"num_prompts": 2},
        log={"trajectories": False},
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "launch.py", "train", str(tmp_path / "recipe.yaml")]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(
        command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.is_file() and '"step": 2' in metrics.read_text()):
            time.sleep(0.05)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "stopping after the update under way" in output, output
    (step,) = checkpoint_steps(tmp_path / "run" / "checkpoints")
    assert step >= 2
    assert choose_checkpoint(tmp_path / "run" / "checkpoints", LoopState.read).state.step == step
    assert re.search(rf"a checkpoint of step {step} was written", output)
    train_command(None, [f"run.steps={step + 1}"], False, tmp_path / "run")
    assert RunFolder(tmp_path / "run").read_metrics()[-1]["step"] == step + 1


def test_a_pipeline_keeps_its_weights_where_an_update_would_spoil_them(tmp_path: Path) -> None:
    rank(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with ForwardBackwardPipeline(model, device="cpu") as pipeline:
        before = [p.detach().clone() for p in model.parameters()]
        pipeline.forward_backward(torch.tensor([[2, 3, 4]])).result()
        with pytest.raises(PipelineError):
            pipeline.optim_step(optimizer).result()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
        with pytest.raises(CheckpointError, match="not finite"):
            pipeline.save_state(tmp_path / "spoilt")
        with pytest.raises(PipelineError, match="not finite"):
            pipeline.sample([2, 3], max_tokens=2)
