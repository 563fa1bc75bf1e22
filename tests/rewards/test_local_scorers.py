from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rl_cluster.config.reward import ExactMatchScorer, RewardConfig, RewardModelScorer
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.local_reward_model import LocalRewardModel
from rl_cluster.rewards.local_scorers import make_local_scorers
from rl_cluster.rewards.reward_model import RewardModel
from rl_cluster.trajectory import TrajectoryGroup

MakeGroup = Callable[..., TrajectoryGroup]


@pytest.fixture
def classifier(tokenizer: Any) -> Qwen2ForSequenceClassification:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        num_labels=1,
        pad_token_id=0,
    )
    return Qwen2ForSequenceClassification(config).eval()


async def test_functions_and_reward_models_score_side_by_side(
    tmp_path: Path, classifier: Any, tokenizer: Any, make_group: MakeGroup
) -> None:
    classifier.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rewards = RewardConfig(scorers=(ExactMatchScorer(), RewardModelScorer(path=str(tmp_path), weight=0.5)))
    exact, taste = make_local_scorers(rewards, tokenizer)
    assert [(s.name, s.weight) for s in (exact, taste)] == [("exact_match", 1.0), ("reward_model", 0.5)]
    group = make_group("1+1=", ["2", "11"], answer="2")
    assert (await exact.score(group)).values.tolist() == [1.0, 0.0]
    model = RewardModel(classifier, tokenizer, tokenizer, 1000)
    expected = model.score(model.encode(group))
    assert (await taste.score(group)).values == pytest.approx(expected, abs=1e-6)
    too_long = await taste.score(make_group("1+1=", ["1" * 20]))
    assert too_long.kind == "raised"
    assert "the reward model takes 16" in too_long.message


async def test_a_forward_pass_that_hangs_is_a_timeout(
    classifier: Any, tokenizer: Any, make_group: MakeGroup
) -> None:
    go_on = threading.Event()

    class Hanging(RewardModel):
        def score(self, sequences: Any) -> Any:
            go_on.wait(60)
            return super().score(sequences)

    scorer = LocalRewardModel("taste", Hanging(classifier, tokenizer, tokenizer, 1000), timeout_seconds=0.1)
    failure = await scorer.score(make_group("1+1=", ["2"]))
    go_on.set()
    assert (failure.kind, failure.message) == ("timeout", "no answer within 0.1 s")


def test_two_scorers_of_one_name_are_refused(tokenizer: Any) -> None:
    with pytest.raises(BadInputError, match="more than one is called 'exact_match'"):
        make_local_scorers(RewardConfig(scorers=(ExactMatchScorer(), ExactMatchScorer())), tokenizer)
