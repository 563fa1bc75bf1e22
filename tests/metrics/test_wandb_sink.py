"""Weights & Biases, whose package is optional: a stand-in for it sees what the real one would be told."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rl_cluster.config import RunConfig
from rl_cluster.config.reading.load import parse_config
from rl_cluster.errors import BadInputError
from rl_cluster.metrics.observer import open_observer
from rl_cluster.protocols import SampleRow
from rl_cluster.run_folder.folder import create_run_folder


class WandbStandIn(types.ModuleType):
    """`wandb` as far as it is used, with the names and signatures of its documentation."""

    class Error(Exception):
        pass

    class Table:
        def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
            self.columns, self.data = columns, data

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0
        self.refusal: str | None = None

    def init(self, *, project: str, name: str, config: dict[str, Any], dir: str) -> WandbStandIn:
        if self.refusal is not None:
            raise self.Error(self.refusal)
        self.started = {"project": project, "name": name, "config": config, "dir": dir}
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> WandbStandIn:
    stand_in = WandbStandIn()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in


def config_in(folder: Path) -> RunConfig:
    return parse_config(
        {
            "run": {"dir": str(folder), "name": "addition", "steps": 3},
            "model": {"scratch": {}},
            "data": {"train": {"source": "addition"}},
            "rewards": {"scorers": [{"kind": "exact_match"}]},
            "log": {"progress": "none", "tensorboard": False, "wandb_project": "sums"},
        }
    )


def test_metrics_and_samples_go_to_the_project_with_their_steps(wandb: WandbStandIn, tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    folder = create_run_folder(config)
    with open_observer(config, folder) as observer:
        observer.metrics(1, {"objective/scores": 0.5, "loss/value_avg": None, "val/ratio": 1.25})
        observer.samples(2, [SampleRow("1+1=", "2", 1.0)])
    assert (wandb.started["project"], wandb.started["name"]) == ("sums", "addition")
    assert wandb.started["dir"] == str(folder.path), "its files belong to the run"
    assert wandb.started["config"]["run"]["steps"] == 3
    (first, second) = wandb.logged
    assert first == (1, {"objective/scores": 0.5, "val/ratio": 1.25}), "what does not apply is left out"
    assert second[0] == 2
    assert second[1]["samples"].columns == ["query", "model response", "score"]
    assert second[1]["samples"].data == [["1+1=", "2", 1.0]]
    assert wandb.finished == 1
    rows = folder.read_metrics()
    assert [row["objective/scores"] for row in rows] == [0.5], "the run folder has them as well"
    assert all(math.isfinite(row["time"]) for row in rows)


def test_a_service_that_refuses_is_bad_input_with_a_way_out(wandb: WandbStandIn, tmp_path: Path) -> None:
    wandb.refusal = "api_key not configured (no-tty)"
    config = config_in(tmp_path / "run")
    folder = create_run_folder(config)
    with pytest.raises(BadInputError, match=r'log.wandb_project = "sums": .*api_key.*WANDB_MODE=offline'):
        open_observer(config, folder)
