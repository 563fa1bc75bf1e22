"""Environments as a run takes them: rows, factories, starts by the run's prompt, cases with their scorer."""

import asyncio
import copy
import json

import numpy as np
import pytest
import torch

from rl_cluster.config.data import DataConfig, FileSource
from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.data.load import load_prompts
from rl_cluster.environments import MultiObjectiveRewardEnv, RLEnvironment, TextGenerationEnv
from rl_cluster.environments.playing.for_runs import (
    ConfiguredFactory,
    case_run,
    configured_factory,
    environment_factory,
    prompts_of,
)
from rl_cluster.environments.playing.hosting import (
    EnvironmentPool,
    HostedEnvironment,
    observed_tokens,
    read_step,
)
from rl_cluster.environments.playing.starting import UnknownPromptError, start_environment
from rl_cluster.errors import BadInputError, EpisodeError
from rl_cluster.trainers.ppo.environment import EnvironmentSource
from rl_cluster.trajectory import Prompt


def as_prompt(tokenizer, text, **metadata):
    return Prompt("row 1", np.array(tokenizer(text)["input_ids"], dtype=np.int32), text, metadata)


def test_every_prompt_is_a_row_that_knows_its_place(tokenizer):
    env = TextGenerationEnv(tokenizer, ["Say a.", "Say b."])
    assert prompts_of(env) == [
        {"prompt": "Say a.", "prompt_idx": 0},
        {"prompt": "Say b.", "prompt_idx": 1},
    ]


class OnlyReset(RLEnvironment):
    def __init__(self, *prompts):
        self.shown = list(prompts)

    def reset(self):
        self.shown.append(self.shown.pop(0))
        return type("Shown", (), {"prompt": self.shown[-1]})()

    def step(self, action):
        raise AssertionError("not in these tests")


def test_an_environment_without_prompts_must_always_show_the_same(tokenizer):
    assert prompts_of(OnlyReset("Say yes:")) == [{"prompt": "Say yes:", "prompt_idx": 0}]
    with pytest.raises(BadInputError, match="OnlyReset has no prompts, and its resets show 'a', 'b'"):
        prompts_of(OnlyReset("a", "b"))
    empty = OnlyReset("a")
    empty.prompts = []
    with pytest.raises(BadInputError, match=r"OnlyReset.prompts=\[\]"):
        prompts_of(empty)


def test_the_runs_prompt_selects_the_start(tokenizer, ids):
    env = TextGenerationEnv(tokenizer, ["Say a.", "Say b.", "Say b."])
    for metadata, index in (({"prompt_idx": 2}, 2), ({}, 1), ({"prompt_idx": 0}, 1), ({"prompt_idx": 7}, 1)):
        shown = start_environment(env, as_prompt(tokenizer, "Say b.", **metadata), seed=0)
        assert observed_tokens(shown) == ids("Say b.")
        assert shown.metadata["prompt_idx"] == index
    with pytest.raises(UnknownPromptError, match=r"row 1: TextGenerationEnv has no prompt 'Say c\.'"):
        start_environment(env, as_prompt(tokenizer, "Say c."), seed=0)


def test_copies_of_an_environment_share_the_heavy_parts_only(tokenizer):
    env = TextGenerationEnv(tokenizer, ["Say a.", "Say b."])
    env.judge = torch.nn.Linear(2, 1)
    make = environment_factory(env)
    first, second = make(None), make(None)
    assert first.tokenizer is second.tokenizer is tokenizer
    assert first.judge is second.judge is env.judge
    first.reset()
    assert (first.current_prompt_idx, second.current_prompt_idx, env.current_prompt_idx) == (1, 0, 0)


def test_classes_and_functions_are_factories_and_other_things_are_refused(tokenizer):
    assert environment_factory(OnlyReset)("a").shown == ["a"]
    function = lambda tokenizer: OnlyReset(tokenizer)  # noqa: E731
    assert environment_factory(function) is function
    with pytest.raises(BadInputError, match="environment is int 3: an environment"):
        environment_factory(3)


MODULE = """
from rl_cluster.environments import TextGenerationEnv

def make(tokenizer, prompts):
    return TextGenerationEnv(tokenizer, prompts)
"""


def test_a_configured_environment_is_made_with_its_options_where_it_is_needed(
    tokenizer, tmp_path, monkeypatch
):
    (tmp_path / "rooms.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    factory = configured_factory(EnvironmentConfig(function="rooms.py:make", options={"prompts": ["A?"]}))
    assert factory == ConfiguredFactory("rooms.py:make", {"prompts": ["A?"]}, tmp_path)
    monkeypatch.chdir("/")
    assert factory(tokenizer).prompts == ["A?"]


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        ({}, None, "rollout.environment.function is not set, and no environment was handed over"),
        ({"function": "json:dumps"}, OnlyReset("a"), "an environment was handed over too"),
        ({"function": "json:nothing"}, None, "'nothing' in json is nothing, not a function"),
    ],
)
def test_neither_both_nor_no_environment_nor_an_unknown_one(settings, given, message):
    with pytest.raises(BadInputError, match=message):
        configured_factory(EnvironmentConfig(**settings), given)


def test_an_environment_handed_over_is_played_in_copies():
    given = OnlyReset("a")
    assert configured_factory(EnvironmentConfig(), given)(None) is not given


def play_text(env, *steps):
    async def play():
        hosted = HostedEnvironment(lambda tokenizer: env, None, 5.0, frozenset())
        await hosted.open()
        shown = await hosted.start(as_prompt(env.tokenizer, env.prompts[-1]), seed=0)
        facts = [await hosted.step(step) for step in steps]
        last = await hosted.truncate()
        hosted.close()
        return shown, facts, last

    return asyncio.run(play())


def test_text_environments_tell_what_belongs_to_the_episode_and_pay_for_cut_ones(tokenizer, ids):
    env = TextGenerationEnv(tokenizer, ["Say a."], stop_sequences=["b"], reward_fn=lambda **k: 0.5)
    shown, (facts,), last = play_text(env, ids("aabaa"))
    assert shown == ids("Say a.")
    assert (facts.done, facts.taken, facts.finish_reason, facts.reward) == (True, 3, "stop", 0.5)
    assert last is None
    _, (facts,), last = play_text(env, ids("aa"))
    assert (facts.done, facts.reward, facts.shown) == (False, 0.0, ids("Say a.aa"))
    assert (last.reward, last.finish_reason, dict(last.metrics)) == (
        0.5,
        "length",
        {"reward": 0.5, "length": 2.0},
    )


def test_components_reach_the_run_under_their_own_names(tokenizer, ids):
    parts = {"short": lambda p, g, f: 2.0, "polite": lambda p, g, f: 1.0}
    env = MultiObjectiveRewardEnv(tokenizer, ["Hi."], parts, {"polite": 0.5}, max_length=2)
    _, (facts,), _ = play_text(env, ids("ab"))
    assert facts.reward == 2.5
    assert facts.metrics == {"reward": 2.5, "length": 2.0, "short": 2.0, "polite": 1.0, "total": 2.5}
    assert facts.finish_reason == "length"


class Loose:
    """A step's answer with what the test wants in it."""

    def __init__(self, **fields):
        vars(self).update(fields)


def test_steps_and_observations_of_any_make_are_read_and_wrong_ones_refused():
    seen = Loose(input_ids=np.array([1, 2]))
    facts = read_step(Loose(reward=np.float32(1), done=False, next_observation=seen), 3)
    assert (facts.reward, facts.shown, facts.taken, facts.metrics) == (1.0, [1, 2], 3, {})
    with pytest.raises(BadInputError, match="Loose without done"):
        read_step(Loose(reward=1.0), 3)
    with pytest.raises(BadInputError, match="dict, which has no input_ids"):
        read_step(Loose(reward=1.0, done=False, next_observation={"text": "hi"}), 3)
    with pytest.raises(BadInputError, match="must be token ids"):
        observed_tokens(Loose(input_ids=torch.tensor([0.5])))
    with pytest.raises(EpisodeError, match="not_finite: speed is 'fast'"):
        read_step(Loose(reward=1.0, done=True, metrics={"speed": "fast"}), 3)


def lookup(city: str) -> str:
    """
    Look a city up.

    Args:
        city: Its name.
    """
    return city


class Hotel:
    rooms = ("101", "202")

    def build_dataset(self, tokenizer):
        chat = [{"role": "user", "content": "Book 202."}]
        return [{"prompt": "Book 101.", "case_idx": 0}, {"prompt": chat, "case_idx": 1}]

    def score_episode(self, model, tokenizer, completion, case_idx):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        assert isinstance(completion, str) == (case_idx == 0)
        return float(self.rooms[case_idx] in text) + (0.0 if model is None else model)

    def get_tools(self):
        return [lookup, {"type": "function", "function": {"name": "pay"}}]


def test_cases_become_rows_and_a_scorer_that_knows_them(tokenizer):
    run = case_run(Hotel(), tokenizer)
    assert [row["case_idx"] for row in run.rows] == [0, 1]
    assert run.rows[0]["prompt"] == "Book 101."
    names = [tool["function"]["name"] for tool in run.rows[1]["tools"]]
    assert names == ["lookup", "pay"]
    metadata = [{"case_idx": 0}, {"case_idx": 1}, {"case_idx": 1}]
    assert run.score(["p"] * 3, ["101", "101", "202 it is"], metadata) == [1.0, 0.0, 1.0]
    assert case_run(Hotel(), tokenizer, model=0.25).score(["p"], ["101"], metadata[:1]) == [1.25]


def test_a_score_that_is_no_number_and_a_tool_that_is_none_are_refused(tokenizer):
    env = Hotel()
    env.score_episode = lambda *_: None
    with pytest.raises(BadInputError, match="score_episode returned None"):
        case_run(env, tokenizer).score(["p"], ["r"], [{"case_idx": 0}])
    env.get_tools = lambda: ["lookup"]
    with pytest.raises(BadInputError, match="get_tools returned 'lookup'"):
        case_run(env, tokenizer)
    env.get_tools = lambda: [lambda x: x]
    with pytest.raises(BadInputError, match="get_tools: no schema"):
        case_run(env, tokenizer)


def test_the_tools_of_a_case_reach_the_chat_template(tokenizer, tmp_path):
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}"
    )
    lines = "".join(json.dumps(row) + "\n" for row in case_run(Hotel(), templated).rows)
    (tmp_path / "cases.jsonl").write_text(lines)
    source = FileSource(source="jsonl", path=str(tmp_path / "cases.jsonl"))
    prompts = load_prompts(DataConfig(train=source, held_out=0), templated).train
    assert [prompt.text for prompt in prompts] == ["Book 101.", "[lookup][pay]Book 202."]
    assert [prompt.metadata["case_idx"] for prompt in prompts] == [0, 1]


def test_a_run_tells_an_environment_the_end_tokens_of_its_model():
    class Listening(RLEnvironment):
        heard = frozenset()

        def take_end_tokens(self, end_token_ids):
            type(self).heard = end_token_ids

        def reset(self): ...

        def step(self, action): ...

    async def run(factory):
        pool = EnvironmentPool(factory, None, EnvironmentConfig(), frozenset([7, 8]))
        await pool.prepare()
        pool.close()

    asyncio.run(run(lambda tokenizer: Listening()))
    assert Listening.heard == {7, 8}
    Listening.heard = frozenset()
    asyncio.run(run(EnvironmentSource(Listening())))
    assert Listening.heard == {7, 8}
