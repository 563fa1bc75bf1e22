"""Comparisons of two responses, who decides them, and the file of pairs."""

import json

import pytest
import torch

from rl_cluster.environments import PreferenceComparisonEnv
from rl_cluster.environments.ready.preference import preference_pair
from rl_cluster.errors import BadInputError

EOS = 1


def compare(env, ids, first, second):
    env.reset()
    return env.step(ids(first)), env.step(torch.tensor(ids(second)))


def longest(texts):
    return [float(len(text)) for text in texts]


def test_an_episode_is_two_whole_responses(tokenizer, ids):
    env = PreferenceComparisonEnv(tokenizer, ["ab ", "c"], preference_model=longest)
    observation = env.reset()
    assert observation.metadata == {"comparison_round": 0, "prompt_idx": 0}
    assert observation.input_ids.tolist() == [ids("ab ")]
    assert env.responses == []
    one = env.step(torch.tensor(ids("xyz")))
    assert (one.reward, one.done, one.info["responses"]) == (0.0, False, ["xyz"])
    assert one.next_observation.metadata["comparison_round"] == 1
    assert one.next_observation.input_ids.tolist() == [ids("ab ")]
    two = env.step(ids("q")[0])
    assert (two.reward, two.done, two.next_observation) == (2.0, True, None)
    assert two.info["preferred"] == 0
    assert two.metrics == {"reward": 2.0, "num_responses": 2.0, "preference_model": 2.0}
    assert env.pairs == [{"prompt": "ab ", "chosen": "xyz", "rejected": "q"}]
    assert env.render() == "Prompt: ab \nResponse 1: xyz\nResponse 2: q"
    assert env.reset().prompt == "c"
    with pytest.raises(BadInputError, match=r"call reset\(\)"):
        [env.step(5) for _ in range(3)]


def test_the_second_response_can_win(tokenizer, ids):
    env = PreferenceComparisonEnv(tokenizer, ["a"], preference_model=longest)
    _, result = compare(env, ids, "x", "xyz")
    assert (result.reward, result.info["preferred"]) == (-2.0, 1)
    assert result.info["pair"] == {"prompt": "a", "chosen": "xyz", "rejected": "x"}


def test_people_decide_before_the_model_and_may_abstain(tokenizer, ids):
    answers = iter([-1, None, 0])
    seen = []

    def feedback(prompt, first, second):
        seen.append((prompt, first, second))
        return next(answers)

    env = PreferenceComparisonEnv(tokenizer, ["a"], longest, feedback)
    rewards = [compare(env, ids, "xyz", "q")[1] for _ in range(3)]
    assert [r.reward for r in rewards] == [-1.0, 2.0, 0.0]
    assert [r.metrics["preference_model"] for r in rewards] == [2.0] * 3
    assert [r.info["preferred"] for r in rewards] == [1, 0, None]
    assert seen == [("a", "xyz", "q")] * 3
    assert len(env.pairs) == 2


def test_without_anybody_to_decide_nothing_is_decided(tokenizer, ids):
    env = PreferenceComparisonEnv(tokenizer, ["a"])
    result = compare(env, ids, "xyz", "q")[1]
    assert (result.reward, result.done, result.info["pair"], env.pairs) == (0.0, True, None, [])


def test_responses_are_cut_at_the_end_token_and_at_max_length(tokenizer, ids):
    env = PreferenceComparisonEnv(tokenizer, ["a"], longest, max_length=4)
    env.reset()
    env.step([*ids("xy"), EOS, *ids("more")])
    assert env.step(ids("abcdef")).info["responses"] == ["xy", "abcd"]


def test_decided_pairs_are_appended_to_the_file_and_ties_are_not(tokenizer, ids, tmp_path):
    path = tmp_path / "pairs.jsonl"
    env = PreferenceComparisonEnv(tokenizer, ["é\n"], longest, pairs_path=path)
    for first, second in [("xyz", "q"), ("q", "z"), ("x", "xü")]:
        compare(env, ids, first, second)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == env.pairs
    assert env.pairs == [
        {"prompt": "é\n", "chosen": "xyz", "rejected": "q"},
        {"prompt": "é\n", "chosen": "xü", "rejected": "x"},
    ]
    again = PreferenceComparisonEnv(tokenizer, ["b"], longest, pairs_path=path)
    compare(again, ids, "xyz", "q")
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3
    other = env.save_pairs(tmp_path / "own.jsonl")
    env.save_pairs(other)
    assert [json.loads(line) for line in other.read_text(encoding="utf-8").splitlines()] == env.pairs


def test_equal_responses_make_no_pair_whatever_the_verdict():
    assert preference_pair("p", "same", "same", 3.0) is None
    assert preference_pair("p", "a", "b", 0.0) is None


class Classifier(torch.nn.Module):
    """Its first logit is the number of tokens; the second would say the opposite."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids, attention_mask):
        assert not self.training
        count = (attention_mask.sum(1, keepdim=True) * self.scale).float()
        return type("Output", (), {"logits": torch.cat([count, -count], dim=1)})()


class RewardModelLike:
    def predict_rewards(self, texts, tokenizer):
        return [[float(text.count("x"))] for text in texts]


class Pairwise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward_pair(self, ids_a, mask_a, ids_b, mask_b):
        return (mask_a.sum(1, keepdim=True) - mask_b.sum(1, keepdim=True)) * self.scale * 0.5


@pytest.mark.parametrize(
    ("model", "expected"), [(Classifier(), 2.0), (RewardModelLike(), 1.0), (Pairwise(), 1.0), (longest, 2.0)]
)
def test_every_kind_of_preference_model_really_scores(tokenizer, ids, model, expected):
    if isinstance(model, torch.nn.Module):
        model.train()
    env = PreferenceComparisonEnv(tokenizer, ["a"], preference_model=model)
    assert compare(env, ids, "xyz", "q")[1].reward == expected
    assert compare(env, ids, "q", "xyz")[1].reward == -expected
    assert getattr(model, "training", True) is True, "the model is left in the mode that it was in"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"max_length": 0}, "max_length"),
        ({"human_feedback_fn": 3}, "human_feedback_fn=3"),
        ({"preference_model": 3}, "preference_model is int"),
        ({"pairs_path": "no/such/folder/pairs.jsonl"}, "folder no/such/folder does not exist"),
        ({"pairs_path": "."}, "is a folder"),
    ],
)
def test_settings_that_cannot_work_are_named(tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        PreferenceComparisonEnv(tokenizer, **({"prompts": ["a"]} | settings))


@pytest.mark.parametrize(
    ("model", "feedback", "message"),
    [
        (lambda texts: [1.0], None, "1 scores for 2 texts"),
        (lambda texts: [float("nan")] * 2, None, "preference_model scored nan"),
        (None, lambda p, a, b: float("nan"), "human_feedback_fn returned nan"),
        (None, lambda p, a, b: "first", "human_feedback_fn returned 'first'"),
    ],
)
def test_a_judge_without_a_number_is_an_error_and_never_a_tie(tokenizer, ids, model, feedback, message):
    env = PreferenceComparisonEnv(tokenizer, ["a"], model, feedback)
    with pytest.raises(BadInputError, match=message):
        compare(env, ids, "xyz", "q")
    assert env.pairs == []


def test_three_prompts_come_in_their_order_and_again(tokenizer):
    env = PreferenceComparisonEnv(tokenizer, ["a", "b", "c"])
    assert env.max_length == 512
    assert [env.reset().prompt for _ in range(5)] == ["a", "b", "c", "a", "b"]


def test_after_a_judge_that_failed_the_comparison_starts_anew(tokenizer, ids):
    answers = iter([float("nan"), 1.0])
    env = PreferenceComparisonEnv(tokenizer, ["a"], None, lambda p, a, b: next(answers))
    with pytest.raises(BadInputError, match="returned nan"):
        compare(env, ids, "xyz", "q")
    with pytest.raises(BadInputError, match=r"call reset\(\)"):
        env.step(ids("third"))
    assert compare(env, ids, "xyz", "q")[1].reward == 1.0
