"""Environments from settings, rewards for whole batches, GRPO cases, and playing an episode."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_cluster.environments import (
    Case,
    CaseSettings,
    MultiObjectiveRewardEnv,
    Observation,
    PreferenceComparisonEnv,
    RLEnvironment,
    StepResult,
    TextGenerationEnv,
    case_reward_function,
    check_case_environment,
    create_env_aware_reward_fn,
    create_rl_environment,
    environment_scorer,
    environment_tools,
    load_case_environment,
    model_player,
    play_episode,
    read_cases,
)
from rl_cluster.errors import BadInputError

EOS = 1
WORDS = {
    "reward_components": {
        "a": {"type": "keyword", "keywords": ["yes", "ok"]},
        "b": {"type": "length"},
        "c": {},
    }
}


def settings(**values):
    return SimpleNamespace(**values)


def make(tokenizer, prompts=("p",), **values):
    return create_rl_environment(settings(**values), tokenizer, list(prompts))


def test_no_environment_is_made_unless_one_is_asked_for(tokenizer):
    assert make(tokenizer) is None
    assert make(tokenizer, rl_env_type=None) is None
    assert make(tokenizer, rl_env_type="") is None


def test_a_text_generation_environment_from_json(tokenizer):
    env = make(
        tokenizer,
        rl_env_type="Text_Generation",
        rl_env_config='{"stop_sequences": ["\\n", "END"]}',
        rl_max_new_tokens=7,
        rl_temperature=0.3,
    )
    assert type(env) is TextGenerationEnv
    assert (env.prompts, env.stop_sequences, env.max_length, env.temperature) == (
        ["p"],
        ["\n", "END"],
        7,
        0.3,
    )
    plain = make(tokenizer, rl_env_type="text_generation")
    assert (plain.max_length, plain.temperature, plain.stop_sequences) == (128, 1.0, [])


def test_functions_are_found_by_import_path(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def count(prompt, generated, full_text):\n    return float(len(generated))\n"
        "def prefer(prompt, first, second):\n    return len(first) - len(second)\n"
    )
    monkeypatch.chdir(tmp_path)
    env = make(tokenizer, rl_env_type="text_generation", rl_env_config={"reward_fn": "my_rewards.py:count"})
    assert env.score("p", "abc", "pabc") == (3.0, {})
    mixed = {"reward_components": {"n": "my_rewards.py:count", "one": lambda p, g, f: 1.0}}
    env = make(tokenizer, rl_env_type="multi_objective", rl_env_config=mixed)
    assert env.score("p", "abc", "pabc")[0] == 4.0
    env = make(
        tokenizer,
        rl_env_type="preference_comparison",
        rl_env_config={
            "human_feedback_fn": "my_rewards.py:prefer",
            "pairs_path": str(tmp_path / "pairs.jsonl"),
        },
    )
    env.reset()
    env.step([5, 6])
    assert env.step([5]).reward == 1.0
    assert (tmp_path / "pairs.jsonl").is_file()
    with pytest.raises(ValueError, match="nothing_here"):
        make(
            tokenizer,
            rl_env_type="text_generation",
            rl_env_config={"reward_fn": "my_rewards.py:nothing_here"},
        )


def test_several_objectives_from_settings(tokenizer):
    env = make(
        tokenizer,
        rl_env_type="multi_objective",
        rl_env_config=json.dumps(WORDS),
        rl_reward_weights='{"a": 0.7, "b": 10}',
    )
    assert type(env) is MultiObjectiveRewardEnv
    total, parts = env.compute_multi_objective_reward("p", "yes or ok", "")
    assert parts == {"a": 2.0, "b": 0.03, "c": 0.5}
    assert total == pytest.approx(0.7 * 2 + 10 * 0.03 + 0.5)
    inside = make(
        tokenizer, rl_env_type="multi_objective", rl_env_config=WORDS | {"reward_weights": {"a": 2.0}}
    )
    assert inside.reward_weights == {"a": 2.0, "b": 1.0, "c": 1.0}


def test_a_preference_environment_from_settings(tokenizer):
    env = make(
        tokenizer,
        rl_env_type="preference_comparison",
        rl_env_config={"preference_model": lambda texts: [len(t) for t in texts]},
        rl_max_new_tokens=3,
        rl_temperature=0.5,
    )
    assert type(env) is PreferenceComparisonEnv
    assert env.max_length == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rl_env_type": "invalid_type"},
            "Invalid rl_env_type: 'invalid_type'. Must be one of: text_generation",
        ),
        ({"rl_env_config": '{"invalid json'}, "Failed to parse rl_env_config"),
        ({"rl_env_config": "[1, 2]"}, "Failed to parse rl_env_config"),
        ({"rl_env_config": {"stop": []}}, r"rl_env_config\['stop'\]: text_generation takes no such setting"),
        ({"rl_reward_weights": '{"a": 1}'}, "rl_reward_weights"),
        ({"rl_env_type": "multi_objective", "rl_env_config": "{}"}, "needs 'reward_components'"),
        ({"rl_env_type": "multi_objective"}, "reward_components"),
        (
            {"rl_env_type": "multi_objective", "rl_env_config": {"reward_components": [1]}},
            "reward_components",
        ),
        (
            {"rl_env_type": "multi_objective", "rl_env_config": WORDS, "rl_reward_weights": "{a"},
            "Failed to parse rl_reward_weights",
        ),
        (
            {
                "rl_env_type": "multi_objective",
                "rl_env_config": WORDS | {"reward_weights": {"a": 1.0}},
                "rl_reward_weights": {"a": 2.0},
            },
            "give one",
        ),
        (
            {"rl_env_type": "multi_objective", "rl_env_config": WORDS, "rl_reward_weights": {"z": 1}},
            "reward_weights",
        ),
        (
            {"rl_env_type": "preference_comparison", "rl_env_config": {"preference_model": "/no/such"}},
            "/no/such",
        ),
        ({"prompts": []}, "prompts is empty"),
    ],
)
def test_settings_that_cannot_work_are_named(tokenizer, values, message):
    with pytest.raises(ValueError, match=message):
        make(tokenizer, **({"rl_env_type": "text_generation"} | values))


@pytest.mark.parametrize(
    "component",
    [
        {"type": "magic"},
        {"type": "keyword"},
        {"type": "keyword", "keywords": "yes"},
        {"words": ["a"]},
        {"keywords": ["a"]},
    ],
)
def test_a_component_that_cannot_work_is_named(tokenizer, component):
    with pytest.raises(BadInputError, match=r"reward_components\['x'\]"):
        make(tokenizer, rl_env_type="multi_objective", rl_env_config={"reward_components": {"x": component}})


def test_batch_rewards_find_the_prompt_that_a_sample_begins_with(tokenizer, ids):
    seen = []

    def reward(prompt, generated, full_text):
        seen.append((prompt, generated, full_text))
        return float(len(generated))

    env = TextGenerationEnv(tokenizer, ["ab", "abc", "x"], reward_fn=reward)
    rewards = create_env_aware_reward_fn(env, None, tokenizer)
    samples = [torch.tensor([0, 0, *ids("abcd"), EOS]), torch.tensor(ids("xyz")), "abz", "other"]
    assert rewards(samples) == [1.0, 2.0, 1.0, 5.0]
    assert seen == [("abc", "d", "abcd"), ("x", "yz", "xyz"), ("ab", "z", "abz"), ("", "other", "other")]
    assert env.current_prompt_idx == 0, "scoring plays no episode"


def test_batch_rewards_of_a_model_alone_and_beside_an_environment(tokenizer, ids):
    def model(texts):
        return [10.0 * len(text) for text in texts]

    env = MultiObjectiveRewardEnv(tokenizer, ["ab"], {"n": lambda p, g, f: float(len(g))}, {"n": 2.0})
    sample = [torch.tensor(ids("abcd"))]
    assert create_env_aware_reward_fn(None, model, tokenizer)(sample) == [40.0]
    assert create_env_aware_reward_fn(env, None, tokenizer)(sample) == [4.0]
    assert create_env_aware_reward_fn(env, model, tokenizer)(sample) == [44.0]


def test_the_default_batch_reward(tokenizer):
    rewards = create_env_aware_reward_fn(None, None, tokenizer)
    assert rewards(["a b", "a b.", "w " * 60]) == pytest.approx([0.0, 0.5, -0.1])


def test_batch_rewards_refuse_what_they_cannot_score(tokenizer):
    preference = PreferenceComparisonEnv(tokenizer, ["a"])
    with pytest.raises(BadInputError, match="env is PreferenceComparisonEnv"):
        create_env_aware_reward_fn(preference, None, tokenizer)
    with pytest.raises(BadInputError, match="reward_model is int"):
        create_env_aware_reward_fn(None, 3, tokenizer)
    for sample in (torch.ones(3), 7):
        with pytest.raises(BadInputError, match="sample is"):
            create_env_aware_reward_fn(None, None, tokenizer)([sample])


def test_an_environment_scores_for_the_main_loop(tokenizer):
    env = MultiObjectiveRewardEnv(
        tokenizer,
        ["ab"],
        {"n": lambda p, g, f: float(len(g)), "f": lambda p, g, f: float(len(f))},
        {"n": 2.0},
    )
    rows = environment_scorer(env)(["ab", "x"], ["cde", ""], [{}, {}])
    assert rows == [
        {"score": 11.0, "n": 3.0, "f": 5.0, "total": 11.0},
        {"score": 1.0, "n": 0.0, "f": 1.0, "total": 1.0},
    ]


class Hotel:
    """A GRPO environment whose cases are room numbers."""

    def __init__(self, rooms=3):
        self.rooms = rooms

    def build_dataset(self, tokenizer):
        return [{"prompt": f"room {n}?", "case_idx": n, "other": 1} for n in range(self.rooms)]

    def score_episode(self, model, tokenizer, completion, case_idx):
        return float(completion == str(case_idx))


def test_cases_and_their_reward_function(tokenizer):
    env = check_case_environment(Hotel())
    assert read_cases(env, tokenizer) == (Case("room 0?", 0), Case("room 1?", 1), Case("room 2?", 2))
    rewards = case_reward_function(env, tokenizer)
    assert rewards(["a", "b", "c"], ["1", "1", "2"], [0, 1, 2], other=[1, 1, 1]) == [0.0, 1.0, 1.0]
    assert environment_tools(env) == []
    env.get_tools = lambda: [len]
    assert environment_tools(env) == [len]


def test_the_model_and_tokenizer_reach_the_environment(tokenizer):
    class Env(Hotel):
        def score_episode(self, model, tokenizer, completion, case_idx):
            return model(tokenizer.decode([5]))

    assert case_reward_function(Env(), tokenizer, model=len)(["a"], ["b"], [0]) == [1.0]


def test_case_defaults_are_the_documented_ones():
    d = CaseSettings()
    assert (d.rl_num_generations, d.rl_kl_coef, d.rl_clip_range, d.rl_loss_type) == (4, 0.1, 0.2, "grpo")
    assert (d.rl_temperature, d.rl_top_k, d.rl_max_new_tokens) == (1.0, 50, 128)


def test_a_case_environment_is_loaded_by_module_and_class(tmp_path, monkeypatch):
    (tmp_path / "my_hotel_env.py").write_text(
        "class HotelEnv:\n    def __init__(self, rooms=1): self.rooms = rooms\n"
        "    def build_dataset(self, tokenizer): return []\n"
        "    def score_episode(self, model, tokenizer, completion, case_idx): return 0.0\n"
        "class Broken:\n    def __init__(self): raise RuntimeError('no rooms')\n"
        "class Half:\n    def build_dataset(self, tokenizer): return []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_case_environment("my_hotel_env", "HotelEnv", rooms=4).rooms == 4
    for name, message in [
        ("Absent", "rl_env_class='Absent': the module my_hotel_env has no such class"),
        ("Broken", "RuntimeError: no rooms"),
        ("Half", "Half has no score_episode"),
    ]:
        with pytest.raises(BadInputError, match=message):
            load_case_environment("my_hotel_env", name)
    with pytest.raises(BadInputError, match="rl_env_module='no_such_module_at_all'"):
        load_case_environment("no_such_module_at_all", "HotelEnv")
    sys.modules.pop("my_hotel_env", None)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "returned no rows"),
        ([{"prompt": "a"}], "row 0 has no 'case_idx'"),
        ([{"prompt": "a", "case_idx": 0}, {"case_idx": 1}], "row 1 has no 'prompt'"),
        ([{"prompt": "", "case_idx": 0}], "row 0 has prompt ''"),
        ([{"prompt": "a", "case_idx": "0"}], "case_idx '0'"),
    ],
)
def test_cases_that_cannot_work_are_named(tokenizer, rows, message):
    env = Hotel()
    env.build_dataset = lambda tokenizer: rows
    with pytest.raises(BadInputError, match=message):
        read_cases(env, tokenizer)


def test_an_episode_score_that_is_no_number_is_an_error(tokenizer):
    env = Hotel()
    env.score_episode = lambda *a: math.nan
    with pytest.raises(BadInputError, match="score_episode returned nan"):
        case_reward_function(env, tokenizer)(["room"], ["1"], [0])


class Constant(torch.nn.Module):
    """The same logits after every sequence."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def test_playing_an_episode_keeps_everything_that_happened(tokenizer):
    env = TextGenerationEnv(tokenizer, ["ab"], max_length=3, reward_fn=lambda p, g, f: len(g) / 2)
    answers = iter([7, 8, 9])

    def player(observation):
        token = next(answers)
        return torch.tensor([token]), torch.tensor([-0.5 * token])

    played = play_episode(env, player)
    assert [a.item() for a in played.actions] == [7, 8, 9]
    assert [p.item() for p in played.logprobs] == [-3.5, -4.0, -4.5]
    assert played.rewards == [0.0, 0.0, 1.5]
    assert (played.total_reward, played.done, played.metrics["length"]) == (1.5, True, 3)
    assert [o.input_ids.shape[1] for o in played.observations] == [2, 3, 4]


def test_a_model_plays_at_the_temperature_of_the_environment(tokenizer):
    logits = np.zeros(len(tokenizer), dtype=np.float32)
    logits[[5, 6]] = [6.0, 4.0]
    env = TextGenerationEnv(tokenizer, ["a"], max_length=400, temperature=0.5)
    generator = torch.Generator().manual_seed(0)
    played = play_episode(env, model_player(Constant(logits), generator))
    p = np.exp(logits / 0.5) / np.exp(logits / 0.5).sum()
    drawn = np.array([a.item() for a in played.actions])
    assert [lp.item() for lp in played.logprobs] == pytest.approx(np.log(p[drawn]), rel=1e-4)
    assert (drawn == 5).mean() == pytest.approx(p[5], abs=0.03)
    assert p[5] == pytest.approx(0.98, abs=0.01), "at temperature 1 it would be 0.56"


def test_an_environment_that_never_ends_is_named(tokenizer):
    observation = Observation(torch.tensor([[1]]), torch.tensor([[1]]), "p")

    class Endless(RLEnvironment):
        def reset(self):
            return observation

        def step(self, action):
            return StepResult(0.0, False, observation)

    class Silent(Endless):
        def step(self, action):
            return StepResult(0.0, False)

    def player(observation):
        return torch.tensor([1]), torch.tensor([0.0])

    assert Endless().render() == "Endless()"
    with pytest.raises(BadInputError, match="max_steps=4"):
        play_episode(Endless(), player, max_steps=4)
    with pytest.raises(BadInputError, match="no next_observation"):
        play_episode(Silent(), player)
