"""The loop of fits on a fake learner: which rows when, what is measured, who may steer, how it resumes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_cluster.algorithms.steps import DPOStep, KTOStep
from rl_cluster.batch import TokenBatch
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.reading.load import parse_as
from rl_cluster.data.fit_encode import Example, Tokens
from rl_cluster.data.pairs import FitRows, FitSets, token_batch
from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.loop.fit import FitLoop, FitState, total_steps, warmup_steps
from rl_cluster.loop.fit_pass import attach, attached, kl_baseline, response_logprobs, with_reference
from rl_cluster.loop.fit_report import fit_metrics
from rl_cluster.loop.hooks import Wishes
from rl_cluster.loop.state import newest_checkpoint
from rl_cluster.protocols import BatchLayout, ForwardOutput, OptimParams, OptimResult


def fit_config(**sections: Any) -> FitConfig:
    base = {"model": {"scratch": {}}, "data": {"source": "given"}, "objective": {"name": "dpo"}}
    return parse_as(FitConfig, {**base, "batch": {"rows_per_step": 2}, **sections})


def make_rows(count: int, first: int = 3) -> FitRows:
    """Pair i: a prompt of one token, chosen [i, 7], rejected [i, 7, 7]."""
    pairs = [
        Example(
            str(i),
            tuple(Tokens(np.array([2, i, *[7] * n], dtype=np.int32), 1) for n in (1, 2)),
        )
        for i in range(first, first + count)
    ]
    rows = FitRows(token_batch(pairs), 2)
    return attach(rows, np.zeros(2 * count), None)


class TableLearner:
    """Every token's log-probability is −scale; an update adds 1 to the scale."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.trained: list[list[int]] = []
        self.steps: list[Any] = []

    async def forward(
        self, batch: TokenBatch, layout: BatchLayout, *, reference: bool = False
    ) -> ForwardOutput:
        scale = 0.5 if reference else self.scale
        logprobs = np.where(batch.action_mask, -scale, 0.0).astype(np.float32)
        return ForwardOutput(logprobs, -logprobs)

    async def forward_backward(
        self, batch: TokenBatch, layout: BatchLayout, rows: Sequence[int], loss: Any
    ) -> tuple[dict[str, float], None]:
        assert list(rows) == list(range(batch.num_rows))
        self.trained.append(batch.tokens[batch.offsets[:-1] + 1][::2].tolist())
        self.steps.append(loss)
        pairs = batch.num_rows / 2
        names = ("chosen_rewards", "rejected_rewards", "chosen_logps", "rejected_logps", "accuracy")
        sums = {f"{name}_sum": pairs for name in names}
        counts = dict.fromkeys(("examples_sum", "chosen_sum", "rejected_sum"), pairs)
        return {**sums, **counts, "example_loss_sum": pairs * self.scale, "tokens_sum": 1.0}, None

    async def optim_step(self, params: OptimParams | None = None) -> OptimResult:
        self.scale += 1
        return OptimResult(int(self.scale), 0.1, 0.5)

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "scale.json").write_text(json.dumps(self.scale))

    async def load(self, folder: Path) -> None:
        self.scale = json.loads((folder / "scale.json").read_text())

    async def export(self, folder: Path) -> None:
        await self.save(folder)

    async def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Notes:
    """An observer that keeps the metrics."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float | None]]] = []

    def phase(self, name: str) -> None: ...

    def metrics(self, step: int, metrics: dict[str, float | None]) -> None:
        self.rows.append((step, metrics))

    def samples(self, step: int, rows: Sequence[Any]) -> None: ...


class Steering:
    """Hooks with prepared wishes: step -> Wishes."""

    def __init__(self, wishes: Mapping[int, Wishes]) -> None:
        self._wishes = wishes
        self.calls: list[tuple[Any, ...]] = []

    def on_begin(self, step: int, last_step: int, folder: Path) -> None:
        self.calls.append(("begin", step, last_step))

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> Wishes:
        return self._wishes.get(step, Wishes())

    def on_evaluate(self, step: int, metrics: Mapping[str, float | None]) -> Wishes:
        self.calls.append(("evaluate", step))
        return Wishes()

    def on_save(self, step: int, checkpoint: Path) -> None:
        self.calls.append(("save", step, checkpoint.name))

    def on_end(self, step: int) -> None:
        self.calls.append(("end", step))


def run(
    config: FitConfig,
    folder: Path,
    learner: TableLearner,
    sets: FitSets | None = None,
    state: FitState | None = None,
    hooks: Sequence[Any] = (),
) -> Notes:
    notes = Notes()
    sets = sets or FitSets(make_rows(5), None)
    asyncio.run(FitLoop(config, learner, sets, notes, folder, state, hooks).run())
    return notes


def test_every_epoch_takes_all_examples_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    learner = TableLearner()
    run(fit_config(run={"epochs": 2, "seed": 1}), tmp_path, learner)
    assert [len(batch) for batch in learner.trained] == [2, 2, 1, 2, 2, 1]
    first, second = (
        [i for batch in part for i in batch] for part in (learner.trained[:3], learner.trained[3:])
    )
    assert sorted(first) == sorted(second) == [3, 4, 5, 6, 7]
    assert first != second
    again = TableLearner()
    run(fit_config(run={"epochs": 2, "seed": 1}), tmp_path, again)
    assert again.trained == learner.trained
    plain = TableLearner()
    config = fit_config(run={"steps": 4}, data={"source": "given", "shuffle": False})
    run(config, tmp_path, plain)
    assert plain.trained == [[3, 4], [5, 6], [7], [3, 4]]
    assert plain.steps[0] == DPOStep(beta=0.1)


def test_steps_and_warm_up_follow_from_epochs_and_ratio() -> None:
    config = fit_config(run={"epochs": 3}, warmup_ratio=0.1)
    assert total_steps(config, 5) == 9
    assert warmup_steps(config, 9) == 1
    assert warmup_steps(config, 11) == 2
    assert warmup_steps(fit_config(optimizer={"warmup_steps": 7}), 9) == 7
    assert total_steps(fit_config(run={"steps": 4}), 5) == 4


def test_evaluation_is_before_the_first_step_every_k_and_after_the_last(tmp_path: Path) -> None:
    sets = FitSets(make_rows(5), make_rows(2, first=20))
    notes = run(fit_config(run={"steps": 5}, eval={"every": 2}), tmp_path, TableLearner(), sets)
    assert [step for step, metrics in notes.rows if "eval/loss" in metrics] == [0, 2, 4, 5]
    # The rejected response has one token more, each −scale: Δ = scale, and the reference is 0.
    losses = [metrics["eval/loss"] for _, metrics in notes.rows if "eval/loss" in metrics]
    expected = [np.log(1 + np.exp(-0.1 * scale)) for scale in (1, 3, 5, 6)]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert notes.rows[0][1]["eval/accuracy"] == 1.0
    assert notes.rows[0][1]["eval/margin"] == pytest.approx(0.1)
    assert notes.rows[0][1]["eval/chosen_logps"] == pytest.approx(-2.0)
    assert notes.rows[1][1]["train/loss"] == 1.0
    assert notes.rows[5][1]["epoch"] == pytest.approx(5 / 3)
    silent = run(fit_config(eval={"at_start": False}), tmp_path, TableLearner(), sets)
    assert [step for step, metrics in silent.rows if "eval/loss" in metrics] == [3]


def test_hooks_may_ask_for_evaluation_checkpoint_and_the_end(tmp_path: Path) -> None:
    hook = Steering({1: Wishes(evaluate=True), 2: Wishes(save=True), 3: Wishes(stop=True)})
    learner = TableLearner()
    sets = FitSets(make_rows(5), make_rows(2, first=20))
    config = fit_config(run={"epochs": 4}, checkpoint={"minutes": 0})
    run(config, tmp_path, learner, sets, hooks=[hook])
    assert hook.calls == [
        ("begin", 0, 12),
        ("evaluate", 0),
        ("evaluate", 1),
        ("save", 2, "step-2"),
        ("evaluate", 3),
        ("end", 3),
    ]
    assert len(learner.trained) == 3


def test_a_resumed_run_takes_the_rest_of_the_batches(tmp_path: Path) -> None:
    config = fit_config(run={"epochs": 2}, checkpoint={"every": 2, "keep_last": 1, "keep_best": False})
    whole = TableLearner()
    run(config, tmp_path / "whole", whole)
    hook = Steering({4: Wishes(stop=True)})
    run(config, tmp_path / "parts", TableLearner(), hooks=[hook])
    folder = newest_checkpoint(tmp_path / "parts" / "checkpoints")
    assert folder.name == "step-4"
    resumed = TableLearner()
    asyncio.run(resumed.load(folder / "learner"))
    run(config, tmp_path / "parts", resumed, state=FitState.read(folder))
    assert resumed.trained == whole.trained[4:]
    assert resumed.scale == whole.scale


def test_resuming_on_other_rows_or_from_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    run(fit_config(checkpoint={"every": 1}), tmp_path, TableLearner())
    state = FitState.read(newest_checkpoint(tmp_path / "checkpoints"))
    with pytest.raises(BadInputError, match="rows are not those"):
        run(fit_config(), tmp_path, TableLearner(), FitSets(make_rows(5, first=9), None), state)
    (tmp_path / "loop.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        FitState.read(tmp_path)


def test_of_equal_held_out_losses_the_first_is_kept(tmp_path: Path) -> None:
    sets = FitSets(make_rows(4), make_rows(2, first=20))
    config = fit_config(
        run={"steps": 4},
        eval={"every": 1},
        checkpoint={"every": 1, "keep_last": 1, "keep_best": True},
        objective={"name": "dpo", "beta": 1.0, "loss": "ipo"},
    )
    # The log-ratio per token is the same for both sides, so every loss is (1/2β)².
    run(config, tmp_path, TableLearner(), sets)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-1", "step-4"]


async def test_reference_sums_are_of_the_reference_and_survive_attaching() -> None:
    rows = await with_reference(TableLearner(), make_rows(3))
    own, other = attached(rows)
    assert own.tolist() == [-1.0, -1.5] * 3
    assert other is None
    assert (await response_logprobs(TableLearner(), rows.batch)).tolist() == [-2.0, -3.0] * 3


async def test_the_kl_baseline_is_the_mean_over_the_step_and_not_negative(monkeypatch: Any) -> None:
    single = [Example(str(i), (Tokens(np.array([2, i, 7], dtype=np.int32), 1),), 1.0) for i in (3, 4, 5)]
    batch = token_batch(single)
    rows = attach(FitRows(batch, 1, batch), np.zeros(3), np.array([-2.0, -3.0, -5.5]))
    learner = TableLearner()
    assert await kl_baseline(learner, rows) == pytest.approx((0 + 1 + 3.5) / 3)
    monkeypatch.setattr("rl_cluster.loop.fit_pass.TOKENS_PER_CHUNK", 4)
    assert await kl_baseline(learner, rows) == pytest.approx(1.5)
    learner.scale = 4.0
    assert await kl_baseline(learner, rows) == 0.0


def test_the_baseline_of_the_step_reaches_the_loss(tmp_path: Path) -> None:
    single = [Example(str(i), (Tokens(np.array([2, i, 7], dtype=np.int32), 1),), 1.0) for i in (3, 4)]
    batch = token_batch(single)
    rows = attach(FitRows(batch, 1, batch), np.zeros(2), np.array([-2.5, -3.5]))
    learner = TableLearner()
    notes = run(fit_config(objective={"name": "kto", "beta": 0.2}), tmp_path, learner, FitSets(rows, None))
    assert learner.steps == [KTOStep(0.2, 1.0, 1.0, z0=1.0)]
    assert notes.rows[0][1]["train/kl_baseline"] == 1.0


def test_means_of_an_area_without_desirable_rows_are_missing_not_zero() -> None:
    totals = dict.fromkeys(("accuracy_sum", "rejected_rewards_sum", "example_loss_sum"), 1.0)
    totals |= {"examples_sum": 2.0, "rejected_sum": 2.0, "chosen_sum": 0.0, "chosen_rewards_sum": 0.0}
    metrics = fit_metrics(totals, "eval")
    assert metrics["eval/chosen_rewards"] is None
    assert metrics["eval/margin"] is None
    assert metrics["eval/rejected_rewards"] == 0.5
