"""Token-level episodes: what a step takes, when an episode ends, what it pays."""

import math

import numpy as np
import pytest
import torch

from rl_cluster.environments import (
    MultiObjectiveRewardEnv,
    Observation,
    PreferenceComparisonEnv,
    StepResult,
    TextGenerationEnv,
)
from rl_cluster.errors import BadInputError

EOS = 1


def play(env, tokens):
    """Token by token to the end; all results."""
    env.reset()
    results = []
    for token in tokens:
        results.append(env.step(token))
        if results[-1].done:
            return results
    return results


def test_reset_shows_the_prompts_in_turn(tokenizer, ids):
    env = TextGenerationEnv(tokenizer, ["ab", "c"], temperature=0.7)
    assert (env.current_prompt_idx, env.prompts, env.max_length) == (0, ["ab", "c"], 512)
    seen = [env.reset() for _ in range(3)]
    assert [o.prompt for o in seen] == ["ab", "c", "ab"]
    assert [o.metadata["prompt_idx"] for o in seen] == [0, 1, 0]
    assert seen[0].input_ids.tolist() == [ids("ab")]
    assert seen[0].attention_mask.tolist() == [[1, 1]]
    assert seen[0].metadata["temperature"] == 0.7
    assert (env.current_text, env.steps, env.responses) == ("ab", 0, [])


def test_observations_carry_the_tokens_that_were_given_not_a_new_tokenisation(tokenizer, ids):
    env = TextGenerationEnv(tokenizer, ["a"])
    env.reset()
    result = env.step(tokenizer.convert_tokens_to_ids("<turn>"))
    assert result.next_observation.input_ids.tolist() == [[*ids("a"), 2]]
    assert result.next_observation.metadata["steps"] == 1
    assert env.current_text == "a"


@pytest.mark.parametrize(
    "shape",
    [lambda t: t, lambda t: torch.tensor(t), lambda t: torch.tensor([t]), lambda t: torch.tensor([[t]])],
)
def test_a_step_takes_an_int_or_a_tensor_of_one_token(tokenizer, ids, shape):
    env = TextGenerationEnv(tokenizer, ["a"])
    results = play(env, [shape(token) for token in [*ids("x y"), EOS]])
    assert [r.done for r in results] == [False, False, False, True]
    assert [type(r.done) for r in results] == [bool] * 4
    assert [r.reward for r in results] == [0.0, 0.0, 0.0, 0.02]
    assert all(type(r.reward) is float for r in results)
    assert results[-1].info == {
        "generated_text": "x y",
        "steps": 4,
        "finish_reason": "stop",
        "tokens_taken": 1,
    }
    assert results[-1].metrics == {"reward": 0.02, "length": 4}
    assert results[-1].next_observation is None
    assert env.responses == ["x y"]
    assert env.render() == "Prompt: a\nGenerated: x y\nSteps: 4"


@pytest.mark.parametrize("many", [torch.tensor, lambda x: torch.tensor([x]), list])
def test_a_step_takes_a_whole_response_and_drops_what_follows_the_end(tokenizer, ids, many):
    env = TextGenerationEnv(tokenizer, ["a"], reward_fn=lambda prompt, generated, full_text: len(generated))
    env.reset()
    result = env.step(many([*ids("xyz"), EOS, *ids("more")]))
    assert result.done
    assert result.info == {
        "generated_text": "xyz",
        "steps": 1,
        "finish_reason": "stop",
        "tokens_taken": 4,
    }
    assert (result.reward, result.metrics["length"]) == (3.0, 4)


def test_the_reward_function_sees_prompt_generated_and_full_text(tokenizer, ids):
    seen = []

    def by_name(*, full_text, generated, prompt):
        seen.append((prompt, generated, full_text))
        return torch.tensor([0.5])

    def by_position(p, g, f):
        seen.append((p, g, f))
        return np.float32(0.25)

    for reward_fn, paid in [(by_name, 0.5), (by_position, 0.25)]:
        env = TextGenerationEnv(tokenizer, ["ab "], reward_fn=reward_fn)
        assert play(env, [*ids("cd"), EOS])[-1].reward == paid
    assert seen == [("ab ", "cd", "ab cd")] * 2


def test_stop_sequences_end_the_episode_only_in_what_was_generated(tokenizer, ids):
    env = TextGenerationEnv(tokenizer, ["END of a\n"], stop_sequences=["END", "\n\n", "<turn>"])
    results = play(env, ids("\nxEND"))
    assert [r.done for r in results] == [False] * 4 + [True]
    assert results[-1].info["generated_text"] == "\nxEND"
    assert results[-1].info["finish_reason"] == "stop"
    env.reset()
    assert env.step(ids("ab\n\ncd")).info["generated_text"] == "ab\n\n"
    special = play(env, [*ids("a"), 2])
    assert special[-1].done, "a stop sequence may be a special token"
    assert special[-1].info["generated_text"] == "a"


def test_max_length_counts_generated_tokens(tokenizer, ids):
    env = TextGenerationEnv(tokenizer, ["a long prompt"], max_length=3)
    results = play(env, ids("abcdef"))
    assert [r.info["finish_reason"] for r in results] == [None, None, "length"]
    env.reset()
    assert env.step(ids("abcdef")).info["generated_text"] == "abc"


def test_the_first_step_begins_the_first_episode_and_a_step_after_the_end_is_refused(tokenizer, ids):
    env = TextGenerationEnv(tokenizer, ["a", "b"])
    assert not env.step(ids("c")[0]).done
    assert (env.current_text, env.current_prompt_idx, env.steps) == ("ac", 1, 1)
    env.step(EOS)
    with pytest.raises(BadInputError, match="is over; call reset"):
        env.step(5)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.tensor([1.0]), "dtype torch.float32"),
        (torch.tensor([True]), "dtype torch.bool"),
        (torch.tensor([[1, 2], [3, 4]]), r"shape \(2, 2\)"),
        (torch.tensor([], dtype=torch.long), "empty"),
        ([], "empty"),
        (10**6, "contains token 1000000"),
        (torch.tensor([3, -1]), "contains token -1"),
        (True, "action is bool"),
        (None, "action is NoneType"),
        ("abc", "action is str"),
        ([1, 2.5], "action is list"),
    ],
)
def test_an_action_that_is_no_token_is_named(tokenizer, action, message):
    env = TextGenerationEnv(tokenizer, ["a"])
    env.reset()
    with pytest.raises(ValueError, match=message):
        env.step(action)
    assert env.steps == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": "ab"}, "prompts is str"),
        ({"prompts": None}, "prompts is NoneType"),
        ({"prompts": ["a", "  "]}, r"prompts\[1\]='  '"),
        ({"prompts": ["a", 3]}, r"prompts\[1\]=3"),
        ({"max_length": 0}, "max_length=0"),
        ({"max_length": 2.5}, "max_length"),
        ({"max_length": True}, "max_length"),
        ({"temperature": 0}, "temperature=0"),
        ({"temperature": math.nan}, "temperature"),
        ({"stop_sequences": "END"}, "stop_sequences='END'"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences"),
        ({"reward_fn": 3}, "reward_fn is int 3"),
        ({"reward_fn": lambda text: 1.0}, r"reward_fn takes \(text\)"),
        ({"prompt_levels": {"easy": []}}, "prompts is empty"),
    ],
)
def test_settings_that_cannot_work_are_named(tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        TextGenerationEnv(tokenizer, **({"prompts": ["a"]} | settings))


def test_a_prompt_longer_than_the_model_takes_is_named(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "model_max_length", 4)
    TextGenerationEnv(tokenizer, ["abc"])
    with pytest.raises(BadInputError, match=r"prompts\[1\]='abcd' has 4 tokens, the model takes 4"):
        TextGenerationEnv(tokenizer, ["a", "abcd"])


@pytest.mark.parametrize("answer", [None, math.nan, math.inf, "1.0", [1.0, 2.0]])
def test_a_reward_that_is_no_finite_number_is_an_error_and_never_zero(tokenizer, answer):
    env = TextGenerationEnv(tokenizer, ["abc"], reward_fn=lambda p, g, f: answer)
    with pytest.raises(BadInputError, match=r"reward_fn returned .* for the prompt 'abc'"):
        play(env, [EOS])


def test_difficulty_changes_the_prompts_from_the_next_reset(tokenizer):
    levels = {"easy": ["e1", "e2"], "hard": ["h"]}
    env = TextGenerationEnv(tokenizer, ["start"], prompt_levels=levels)
    assert env.reset().prompt == "start"
    env.set_difficulty("easy")
    assert [env.reset().prompt, env.reset().prompt] == ["e1", "e2"]
    env.set_difficulty("hard")
    assert env.reset().prompt == "h"
    with pytest.raises(BadInputError, match=r"set_difficulty\('harder'\).*easy, hard"):
        env.set_difficulty("harder")
    with pytest.raises(BadInputError, match="prompt_levels"):
        TextGenerationEnv(tokenizer, ["a"]).set_difficulty("easy")


def test_a_leading_space_of_the_response_is_kept():
    """A SentencePiece-like decoder drops the first space of what it decodes."""

    class Words:
        eos_token_id, bos_token, eos_token, sep_token_id, model_max_length = 0, None, None, None, 100
        words = ("", "one", "▁two", "▁three")

        def __len__(self):
            return 4

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [1]}

        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            return "".join(self.words[i] for i in ids).replace("▁", " ").lstrip()

    env = TextGenerationEnv(Words(), ["one"])
    env.reset()
    assert env.step([2, 3, 0]).info["generated_text"] == " two three"
    assert env.current_text == "one two three"


def components(**settings):
    return {
        "reward_components": {"x": lambda p, g, f: float(g.count("x")), "long": lambda p, g, f: len(f) / 10},
        "reward_weights": {"x": 2.0},
    } | settings


def test_several_objectives_are_paid_as_a_weighted_sum_and_reported_apart(tokenizer, ids):
    env = MultiObjectiveRewardEnv(tokenizer, ["ab"], **components(), max_length=5)
    assert env.reward_weights == {"x": 2.0, "long": 1.0}
    assert isinstance(env, TextGenerationEnv)
    env.reset()
    first = env.step(ids("xx"))
    assert (first.reward, first.metrics["reward_x"], first.metrics["reward_total"]) == (0.0, 0.0, 0.0)
    last = env.step(EOS)
    assert last.reward == pytest.approx(2 * 2 + 0.4)
    assert last.metrics == pytest.approx(
        {"reward": 4.4, "length": 3, "reward_x": 2.0, "reward_long": 0.4, "reward_total": 4.4}
    )
    total, parts = env.compute_multi_objective_reward("ab", "x", "abx")
    assert (total, parts) == (pytest.approx(2.3), {"x": 1.0, "long": pytest.approx(0.3)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_components": {}}, "reward_components"),
        ({"reward_components": [len]}, "reward_components"),
        ({"reward_components": {"x": 1.0}}, r"reward_components\['x'\] is float"),
        ({"reward_weights": {"y": 1.0}}, r"reward_weights\['y'\]: no such component. There are: x, long"),
        ({"reward_weights": {"x": math.nan}}, r"reward_weights\['x'\]=nan"),
        ({"reward_fn": len}, "takes reward_components instead"),
    ],
)
def test_objectives_that_cannot_work_are_named(tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        MultiObjectiveRewardEnv(tokenizer, ["a"], **components(**settings))


def test_the_data_classes_have_the_documented_fields_and_defaults():
    observation = Observation(torch.tensor([1, 2]), torch.tensor([1, 1]), "p")
    assert observation.metadata == {}
    result = StepResult(reward=1.5, done=True, info={"a": 1}, metrics={"m": 0.8})
    assert (result.next_observation, result.info, result.metrics) == (None, {"a": 1}, {"m": 0.8})


def test_three_prompts_come_in_their_order_and_again(tokenizer):
    env = TextGenerationEnv(tokenizer, ["a", "b", "c"])
    assert env.temperature == 1.0
    assert [env.reset().prompt for _ in range(5)] == ["a", "b", "c", "a", "b"]
    assert env.current_prompt_idx == 2


@pytest.mark.parametrize("make", [TextGenerationEnv, PreferenceComparisonEnv])
def test_every_end_token_of_a_model_ends_a_response(tokenizer, ids, make):
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    options = {} if make is TextGenerationEnv else {"human_feedback_fn": lambda p, a, b: 1.0}

    def text_of(env, tokens):
        env.reset()
        result = env.step(torch.tensor(tokens))
        return env.responses[0], result.done

    action = [*ids("x"), turn, *ids("y"), EOS, *ids("z")]
    assert text_of(make(tokenizer, ["a"], **options), action)[0] == "xy"
    two = make(tokenizer, ["a"], end_token_ids=[turn], **options)
    assert text_of(two, action)[0] == "x"
    assert text_of(two, [*ids("z"), EOS, *ids("x")])[0] == "z", "the tokenizer's own still is one"
    told = make(tokenizer, ["a"], **options)
    told.take_end_tokens(frozenset([turn]))
    assert text_of(told, action)[0] == "x"
    for wrong in ("<turn>", [1.5], [True], object()):
        with pytest.raises(BadInputError, match="end_token_ids"):
            make(tokenizer, ["a"], end_token_ids=wrong, **options)
