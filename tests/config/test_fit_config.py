"""The recipes of fits are sound, their plan is what runs, and wrong settings are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_cluster.config.checks.fit import check_fit_config
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.planning.fit_plan import make_fit_plan
from rl_cluster.config.planning.machine import GIB, Machine
from rl_cluster.config.reading.load import dump_config, load_as, parse_as
from rl_cluster.data.pairs import load_fit_data
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_tokenizer

ROOT = Path(__file__).parents[2]
LAPTOP = Machine(cores=4, memory=16 * GIB, gpus=0, gpu_memory=0)
NODES = Machine(cores=64, memory=500 * GIB, gpus=8, gpu_memory=80 * GIB, num_nodes=2)


@pytest.mark.parametrize(("recipe", "per_example"), [("sft", 1), ("dpo", 2), ("reward_model", 2)])
def test_recipes_are_sound_and_their_rows_all_fit(
    recipe: str, per_example: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_as(FitConfig, f"configs/{recipe}.yaml")
    check_fit_config(config, LAPTOP)
    plan = make_fit_plan(config, LAPTOP)
    scratch = config.model.scratch
    assert scratch is not None
    tokenizer = build_tokenizer(scratch.alphabet, scratch.max_positions)
    sets = load_fit_data(config.data, config.objective, tokenizer, plan.max_length)
    assert sets.evaluation is not None
    assert (sets.train.num_examples, sets.evaluation.num_examples, sets.skipped) == (360, 40, ())
    assert sets.train.rows_per_example == per_example


def base(**sections: object) -> FitConfig:
    values = {"model": {"scratch": {}}, "data": {"source": "given"}, "objective": {"name": "dpo"}}
    return parse_as(FitConfig, values | sections)


def test_a_configuration_survives_its_yaml(tmp_path: Path) -> None:
    config = base(objective={"name": "kto", "beta": 0.3}, warmup_ratio=0.2)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_as(FitConfig, tmp_path / "config.yaml") == config


def test_ranks_share_the_cores_of_a_node_or_take_a_gpu_each() -> None:
    plan = make_fit_plan(base(learner={"num_ranks": 2}), LAPTOP)
    assert [(w.name, w.node, w.threads, w.num_cpus, w.gpus) for w in plan.workers] == [
        ("learner-0", 0, 2, 2.0, ()),
        ("learner-1", 0, 2, 2.0, ()),
    ]
    tiny = base(learner={"num_ranks": 2}, model={"scratch": {"hidden_size": 32}})
    assert [w.threads for w in make_fit_plan(tiny, LAPTOP).workers] == [1, 1]
    plan = make_fit_plan(base(learner={"num_ranks": 10}), NODES)
    assert plan.device == "cuda"
    assert [(w.node, w.gpus, w.num_gpus) for w in plan.workers][7:] == [
        (0, (7,), 1.0),
        (1, (0,), 1.0),
        (1, (1,), 1.0),
    ]


def test_lengths_stay_within_the_positions_and_reward_rows_need_one_more() -> None:
    assert make_fit_plan(base(), LAPTOP).max_length == 256
    assert make_fit_plan(base(objective={"name": "reward"}), LAPTOP).max_length == 255
    assert make_fit_plan(base(data={"source": "given", "max_length": 9}), LAPTOP).max_length == 9


@pytest.mark.parametrize(
    ("sections", "machine", "message"),
    [
        (
            {"learner": {"num_ranks": 5}},
            LAPTOP,
            "learner.num_ranks = 5: ranks of 1 cores need more than the 4",
        ),
        (
            {"learner": {"num_ranks": 17}},
            NODES,
            "learner.num_ranks = 17: each rank takes a GPU, and there are 16",
        ),
        ({"cluster": {"device": "cuda"}}, LAPTOP, "cluster.device"),
        ({"learner": {"offload_optimizer": True}}, LAPTOP, "learner.offload_optimizer"),
        ({"model": {}}, LAPTOP, "model.path"),
        (
            {"objective": {"name": "kto", "desirable_weight": 0.0, "undesirable_weight": 0.0}},
            LAPTOP,
            "is 0, as",
        ),
    ],
)
def test_what_the_machine_cannot_do_is_named(sections: dict, machine: Machine, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        check_fit_config(base(**sections), machine)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"name": "dop"}, "Did you mean dpo?"),
        ({"name": "dpo", "label_smoothing": 0.5}, "objective.label_smoothing = 0.5: must be less than 0.5"),
        ({"name": "orpo", "beta": 0.1}, "It belongs to another choice of objective"),
    ],
)
def test_wrong_objectives_are_explained(objective: dict, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        base(objective=objective)
    assert message in str(caught.value)
