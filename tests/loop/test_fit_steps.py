"""From a fit's objective, with nothing left at its default, to the step that the learner is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_cluster.algorithms.fit_table import compares_with_reference, reference_model
from rl_cluster.algorithms.steps import CrossEntropyStep, DPOStep, KTOStep, LossStep, ORPOStep, RewardStep
from rl_cluster.config.fit import DPO, KTO, ORPO, RewardObjective
from rl_cluster.data.fit_encode import Example, Tokens
from rl_cluster.data.pairs import FitRows, FitSets, token_batch
from rl_cluster.loop.fit import FitState
from rl_cluster.loop.fit_pass import attach
from rl_cluster.loop.hooks import Wishes
from rl_cluster.loop.state import newest_checkpoint
from rl_cluster.protocols import OptimParams, OptimResult
from tests.loop.test_fit_loop import Steering, TableLearner, fit_config, make_rows, run

OBJECTIVES: list[tuple[dict[str, Any], LossStep]] = [
    ({"name": "sft"}, CrossEntropyStep()),
    (
        {"name": "dpo", "beta": 0.3, "loss": "hinge", "label_smoothing": 0.0, "reference_free": True},
        DPOStep(beta=0.3, loss="hinge", label_smoothing=0.0, reference_free=True),
    ),
    ({"name": "dpo", "label_smoothing": 0.2}, DPOStep(beta=0.1, label_smoothing=0.2)),
    ({"name": "dpo", "loss": "ipo"}, DPOStep(beta=0.1, loss="ipo")),
    ({"name": "orpo", "coef": 0.7}, ORPOStep(coef=0.7)),
    ({"name": "reward", "margin": 0.4, "centre": 0.05}, RewardStep(margin=0.4, centre=0.05)),
]


@pytest.mark.parametrize(("objective", "expected"), OBJECTIVES, ids=[str(o) for o, _ in OBJECTIVES])
def test_every_setting_of_an_objective_reaches_the_learner(
    objective: dict[str, Any], expected: LossStep, tmp_path: Path
) -> None:
    learner = TableLearner()
    run(fit_config(objective=objective), tmp_path, learner)
    assert learner.steps == [expected] * 3


def test_the_weights_of_kto_reach_the_learner(tmp_path: Path) -> None:
    single = [Example(str(i), (Tokens(np.array([2, i, 7], dtype=np.int32), 1),), 1.0) for i in (3, 4)]
    batch = token_batch(single)
    rows = attach(FitRows(batch, 1, batch), np.zeros(2), np.array([-2.5, -3.5]))
    objective = {"name": "kto", "beta": 0.2, "desirable_weight": 0.6, "undesirable_weight": 1.4}
    learner = TableLearner()
    run(fit_config(objective=objective), tmp_path, learner, FitSets(rows, None))
    assert learner.steps == [KTOStep(0.2, 0.6, 1.4, z0=1.0)]


def test_no_setting_of_an_objective_is_left_out_of_these_cases() -> None:
    """reference_model says which model is asked, not what is minimised; rows and train_on are the data's."""
    tried: dict[str, set[str]] = {}
    for objective, _ in OBJECTIVES:
        tried.setdefault(objective["name"], set()).update(objective)
    for kind in (DPO, ORPO, RewardObjective):
        assert tried[kind.model_fields["name"].default] | {"reference_model"} >= set(kind.model_fields)
    assert set(KTO.model_fields) == {
        "name",
        "beta",
        "desirable_weight",
        "undesirable_weight",
        "reference_model",
    }


class Decided(TableLearner):
    """Whose log-probabilities per token follow a given list, update by update."""

    def __init__(self, scales: list[float]) -> None:
        super().__init__()
        self._scales = scales
        self.scale = scales[0]
        self.params: list[OptimParams | None] = []

    async def optim_step(self, params: OptimParams | None = None) -> OptimResult:
        self.params.append(params)
        self.scale = self._scales[len(self.params)]
        return OptimResult(len(self.params), 0.1, 0.5)


def test_the_checkpoint_of_the_lowest_held_out_loss_is_kept(tmp_path: Path) -> None:
    """The rejected response has one token more: the larger the scale, the larger the margin of the chosen."""
    sets = FitSets(make_rows(4), make_rows(2, first=20))
    config = fit_config(
        run={"steps": 5},
        eval={"every": 1},
        checkpoint={"every": 1, "keep_last": 1, "keep_best": True},
    )
    notes = run(config, tmp_path, Decided([1.0, 2.0, 5.0, 3.0, 4.0, 0.5]), sets)
    losses = {step: metrics["eval/loss"] for step, metrics in notes.rows if "eval/loss" in metrics}
    assert min(losses, key=lambda step: losses[step]) == 2
    assert losses[2] == pytest.approx(np.log(1 + np.exp(-0.1 * 5.0)))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-2", "step-5"]


def test_a_resumed_fit_still_knows_its_best_step(tmp_path: Path) -> None:
    sets = FitSets(make_rows(4), make_rows(2, first=20))
    checkpoint = {"every": 1, "keep_last": 1, "keep_best": True}
    first = fit_config(run={"steps": 3}, eval={"every": 1}, checkpoint=checkpoint)
    run(first, tmp_path, Decided([1.0, 6.0, 3.0, 2.0]), sets)
    state = FitState.read(newest_checkpoint(tmp_path / "checkpoints"))
    second = fit_config(run={"steps": 5}, eval={"every": 1}, checkpoint=checkpoint)
    run(second, tmp_path, Decided([2.0, 4.0, 5.0]), sets, state)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-1", "step-5"]


def test_the_schedule_of_a_fit_is_the_learners_own(tmp_path: Path) -> None:
    learner = Decided([1.0] * 4)
    run(fit_config(), tmp_path, learner)
    assert learner.params and all(params in (None, OptimParams()) for params in learner.params)


def test_who_is_compared_with_a_reference_and_with_which() -> None:
    asks = {"sft": False, "dpo": True, "orpo": False, "kto": True, "reward": False}
    for name, expected in asks.items():
        objective = fit_config(objective={"name": name}).objective
        assert compares_with_reference(objective) is expected, name
        assert reference_model(objective) is None
    assert not compares_with_reference(DPO(reference_free=True))
    assert reference_model(DPO(reference_model="there")) == "there"
    assert reference_model(KTO(reference_model="here")) == "here"


def test_a_fit_leaves_a_checkpoint_at_its_end_whatever_the_interval(tmp_path: Path) -> None:
    def saved(folder: Path, hooks: list[Steering]) -> list[str]:
        checkpoint = {"every": 2, "keep_last": 9, "keep_best": False}
        run(fit_config(run={"steps": 5}, checkpoint=checkpoint), folder, TableLearner(), hooks=hooks)
        return sorted(path.name for path in (folder / "checkpoints").iterdir())

    assert saved(tmp_path / "whole", []) == ["step-2", "step-4", "step-5"]
    assert saved(tmp_path / "stopped", [Steering({3: Wishes(stop=True)})]) == ["step-2", "step-3"]
