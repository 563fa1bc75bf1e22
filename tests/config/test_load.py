"""Loading: YAML and overrides become a RunConfig, or one readable message that lists everything wrong."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_cluster.config.algorithm import PPO
from rl_cluster.config.reading.load import (
    apply_override,
    dump_config,
    load_config,
    parse_config,
    with_settings,
)
from rl_cluster.config.reading.yaml_text import dump_yaml, parse_yaml
from rl_cluster.errors import BadInputError

BASE = """
model: {scratch: {}}
data: {train: {source: addition}}
rewards: {scorers: [{kind: exact_match}]}
"""

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in ("ab", "bc", "cd", "de", "ef", "fg", "gh")
)

# (overrides, parts of the message): unknown keys, wrong types, out of range, unions
BAD = [
    (["batch.prompts_per_stpe=3"], ["batch.prompts_per_stpe = 3", "Did you mean batch.prompts_per_step?"]),
    (["optimzer.learning_rate=1"], ["optimzer", "Did you mean optimizer?"]),
    (["learning_rate=1"], ["optimizer.learning_rate"]),
    (["temperature=1"], ["eval.temperature or rollout.temperature"]),
    (["asynchrony.max_policy_lag=1"], ["Did you mean async?"]),
    (["zzz=1"], ["zzz = 1: unknown key", "Known here: run, model"]),
    (["rewards.scorers.0.answerkey=x"], ["rewards.scorers.0.answerkey", "rewards.scorers.0.answer_key?"]),
    (["algorithm={name: grpo, gamma: 1}"], ["algorithm.gamma = 1", "belongs to another choice of algorithm"]),
    (["run.steps=0"], ["run.steps = 0", "must be greater than 0"]),
    (["run.steps=many"], ['run.steps = "many"', "must be a whole number"]),
    (["run.steps=2.5"], ["run.steps = 2.5", "must be a whole number"]),
    (["run.steps='10'"], ['run.steps = "10"', "without quotes"]),
    (["run.steps=true"], ["run.steps = true", "must be a whole number"]),
    (["run.steps=null"], ["run.steps = null", "must be a whole number"]),
    (["run.seed=-1"], ["run.seed = -1", "must be at least 0"]),
    (["run.name=12"], ["run.name = 12", "must be text", "Put it in quotes"]),
    (["rollout.top_p=1.5"], ["rollout.top_p = 1.5", "must be at most 1"]),
    (["rollout.temperature=0"], ["rollout.temperature = 0", "must be greater than 0"]),
    (["rollout.temperature=.nan"], ["rollout.temperature", "must be a finite number"]),
    (["optimizer.learning_rate=.inf"], ["optimizer.learning_rate", "must be a finite number"]),
    (["optimizer.learning_rate=fast"], ['"fast"', "must be a number", "1e-6"]),
    (["optimizer.betas=0.9"], ["optimizer.betas = 0.9", "must be a list"]),
    (["optimizer.betas=[0.9]"], ["optimizer.betas.1", "is required"]),
    (["optimizer.schedule=cosin"], ["Did you mean cosine?", "constant, linear, cosine"]),
    (["model.dtype=float16"], ["model.dtype", "float32, bfloat16"]),
    (["model.gradient_checkpointing=yes"], ["must be true or false"]),
    (["model.scratch=5"], ["model.scratch = 5", "must be a section of keys"]),
    (["model.lora={rank: 0}"], ["model.lora.rank = 0", "must be greater than 0"]),
    (["model.lora={targets: 3}"], ["model.lora.targets = 3"]),
    (["learner.zero_stage=4"], ["learner.zero_stage = 4", "must be at most 3"]),
    (
        ["algorithm.name=grop"],
        ['algorithm.name = "grop"', "Did you mean grpo?", "ppo, rloo, grpo, reinforce"],
    ),
    (["algorithm.kl.coef=0.1"], ["algorithm.name", "is required", "ppo, rloo, grpo, reinforce"]),
    (["algorithm={name: ppo, lam: 2}"], ["algorithm.lam = 2", "must be at most 1"]),
    (["algorithm={name: ppo, critic: {warmup: 1}}"], ["algorithm.critic.warmup_steps?"]),
    (["data.train.source=adition"], ["data.train.source", "Did you mean addition?"]),
    (["data.train={num_digits: 3}"], ["data.train.source", "is required", "jsonl, csv, parquet"]),
    (["data.train={source: jsonl}"], ["data.train.path", "is required"]),
    (["rewards.scorers=[]"], ["rewards.scorers = []", "needs 1 or more entries"]),
    (["rewards.scorers=[{weight: 2}]"], ["rewards.scorers.0.kind", "is required"]),
    (["rewards.scorers.0.weight=heavy"], ["rewards.scorers.0.weight", "must be a number"]),
    (["rewards.scorers.1.weight=1"], ["'1' is not an entry of a list of 1"]),
    (["rollout.stop=text"], ["rollout.stop", "must be a list"]),
    (["rollout=3"], ["rollout = 3", "must be a section"]),
    (["model=null"], ["model = null", "must be a section"]),
    (["run.dir=[1]"], ["run.dir", "must be text"]),
    (["run.steps.more=1"], ["run.steps", "must be a whole number"]),
    (["steps"], ["'steps' is not of the form key.path=value"]),
    (["=3"], ["is not of the form key.path=value"]),
    (["run..steps=3"], ["is not of the form key.path=value"]),
    (["run.name={a"], ["not valid YAML"]),
]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    return path


@pytest.mark.parametrize(("overrides", "parts"), BAD, ids=[o[0] for o, _ in BAD])
def test_a_wrong_value_names_the_field_and_the_remedy(recipe, overrides, parts):
    with pytest.raises(BadInputError) as caught:
        load_config(recipe, overrides)
    message = str(caught.value)
    for part in parts:
        assert part in message
    for jargon in ("pydantic", "validation error", "type=", "Input should"):
        assert jargon not in message


def test_all_wrong_fields_are_reported_at_once(recipe):
    with pytest.raises(BadInputError, match="3 problems") as caught:
        load_config(recipe, ["run.steps=0", "run.sead=1", "optimizer.eps=0"])
    assert str(caught.value).count("\n  - ") == 3


def test_a_wrong_entry_does_not_make_its_list_too_short(recipe):
    with pytest.raises(BadInputError) as caught:
        load_config(recipe, ["rewards.scorers.0.wait=1"])
    assert "or more entries" not in str(caught.value)


def test_the_resolved_config_loads_back_to_an_equal_one(recipe, tmp_path):
    config = load_config(recipe, ["async.max_policy_lag=1", "rollout.stop=['\\n']", "model.lora={rank: 4}"])
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert yaml.safe_load(path.read_text())["async"]["max_policy_lag"] == 1


def test_overrides_apply_in_order_and_reach_into_lists(recipe):
    config = load_config(
        recipe,
        ["run.steps=3", "run.steps=4", "rewards.scorers.0.weight=2", "algorithm={name: ppo, lam: 1}"],
    )
    assert config.run.steps == 4
    assert config.rewards.scorers[0].weight == 2.0
    assert isinstance(config.algorithm, PPO)
    assert config.algorithm.lam == 1.0


def test_an_override_leaves_the_data_it_was_given_alone():
    data = {"a": {"b": [1, 2]}}
    assert apply_override(data, "a.b.1=5") == {"a": {"b": [1, 5]}}
    assert data == {"a": {"b": [1, 2]}}


def test_numbers_are_read_as_people_write_them():
    text = "a: 1e-6\nb: 1.5e3\nc: 3E4\nd: -2\ne: 0.5\nf: on\ng: 2026-01-02\nh: true\ni: 1."
    expected = {
        "a": 1e-6,
        "b": 1500.0,
        "c": 3e4,
        "d": -2,
        "e": 0.5,
        "f": "on",
        "g": "2026-01-02",
        "h": True,
        "i": 1.0,
    }
    assert parse_yaml(text, "text") == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("1:30", "1:30"),
        ("0b11", "0b11"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
        ("+12", 12),
        (".5", 0.5),
        ("yes", "yes"),
        ("~", None),
        ("%YAML 1.1\n---\noff", "off"),
        ("<<: {a: 1}", {"<<": {"a": 1}}),
    ],
)
def test_a_plain_scalar_means_what_yaml_1_2_says(text, value):
    found = parse_yaml(text, "text")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", BOMB], ids=["list", "mapping", "bomb"])
def test_aliases_without_end_are_refused(text):
    with pytest.raises(BadInputError, match=r"recipe: not valid YAML: its aliases .* Write out"):
        parse_yaml(text, "recipe")


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
TRICKY = st.sampled_from(
    ["on", "1:30", "1e-6", "010", "1_0", "=", "<<", "2020-01-01", "~", "", "0x1", "\u2028"]
)
DATA = st.recursive(
    PLAIN | TRICKY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(DATA)
def test_what_is_written_is_read_back_also_by_readers_of_yaml_1_1(data):
    text = dump_yaml(data)
    assert parse_yaml(text, "text") == data
    assert yaml.safe_load(text) == data


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("run: {steps: 1}\nrun: {steps: 2}", "recipe.yaml:2:1: not valid YAML: key 'run' is given twice"),
        ("run: [", "recipe.yaml:1:7: not valid YAML"),
        ("1: 2", "key 1 is not text"),
        ("- a\n- b", "is a mapping of sections, not list"),
        ("hello", "is a mapping of sections, not str"),
        ("run: !!python/object:os.system {}", "not valid YAML"),
        ("", "model: is required"),
    ],
)
def test_text_that_is_no_configuration_is_refused_with_its_place(tmp_path, text, part):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(BadInputError) as caught:
        load_config(path)
    assert part in str(caught.value)


def test_a_missing_file_suggests_the_nearest_recipe(recipe):
    with pytest.raises(BadInputError, match=r"Did you mean .*recipe\.yaml\?"):
        load_config(recipe.with_name("recipes.yaml"))


def test_a_folder_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(BadInputError, match="is a folder"):
        load_config(tmp_path)
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match="cannot be read"):
        load_config(binary)


def test_plain_data_is_checked_like_a_file():
    with pytest.raises(BadInputError, match="bad configuration in notebook"):
        parse_config({"model": {}, "data": {}, "rewards": {}}, source="notebook")


def test_files_and_folders_that_exist_become_absolute_and_names_of_the_hub_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}")
    data = yaml.safe_load(BASE) | {"model": {"path": "small", "reference_path": "org/name"}}
    data["data"] = {"train": {"source": "jsonl", "path": "rows.jsonl", "eval_path": "absent.jsonl"}}
    config = parse_config(data, "")
    assert (config.model.path, config.model.reference_path) == (str(tmp_path / "small"), "org/name")
    train = config.data.train
    assert (train.path, train.eval_path) == (str(tmp_path / "rows.jsonl"), "absent.jsonl")


def test_dotted_settings_are_applied_as_they_are() -> None:
    data = {"run": {"name": "a"}, "rewards": {"scorers": [{"weight": 1.0}, {"weight": 2.0}]}, "model": None}
    given = {"run.name": "12", "run.dir": None, "rewards.scorers.1.weight": 3, "model.lora.rank": 4}
    assert with_settings(data, given) == {
        "run": {"name": "12", "dir": None},
        "rewards": {"scorers": [{"weight": 1.0}, {"weight": 3}]},
        "model": {"lora": {"rank": 4}},
    }
    assert data["run"] == {"name": "a"}, "what is given stays as it is"


@pytest.mark.parametrize(
    ("name", "message"),
    [("run.name.x", "'a' is a value"), ("run..x", "is no dotted name"), (3, "is no dotted name")],
)
def test_a_dotted_name_that_leads_nowhere_is_refused(name: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=rf"^PPOConfig\.settings\[{name!r}\]: {message}"):
        with_settings({"run": {"name": "a"}}, {name: 1}, "PPOConfig.")
