"""A reward-model checkpoint in a Ray worker, on one local Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from actors.reward_model_worker import make_reward_model_scorer
from rl_cluster.config.reward import RewardModelScorer
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import TrajectoryGroup

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("ray_session")]
MakeGroup = Callable[..., TrajectoryGroup]


def save_classifier(folder: Path, tokenizer: Any) -> Qwen2ForSequenceClassification:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


async def test_concurrent_groups_get_the_scores_that_transformers_gives_each_sequence_alone(
    tmp_path: Path, char_tokenizer: Any, make_group: MakeGroup
) -> None:
    model = save_classifier(tmp_path, char_tokenizer)
    config = RewardModelScorer(path=str(tmp_path), tokens_per_batch=100, weight=2.0)
    scorer = make_reward_model_scorer(config, "taste", char_tokenizer, num_cpus=0)
    groups = [make_group(f"{i}+{i}=", [str(2 * i), "1" * i, "(1 + 2) * 3"], i) for i in range(1, 8)]
    too_long = make_group("1+1=", ["1" * 60])
    await scorer.start()
    try:
        outcomes = await asyncio.gather(*(scorer.score(ray.put(group)) for group in [*groups, too_long]))
    finally:
        await scorer.close()
    assert (scorer.name, scorer.weight) == ("taste", 2.0)
    for group, outcome in zip(groups, outcomes[:-1], strict=True):
        with torch.no_grad():
            expected = [
                float(
                    model(input_ids=torch.from_numpy(trajectory.tokens[None].astype(np.int64))).logits[0, 0]
                )
                for trajectory in group.trajectories
            ]
        np.testing.assert_allclose(outcome.values, expected, rtol=1e-5, atol=1e-5)
    assert outcomes[-1].kind == "raised"
    assert "have 65 tokens, the reward model takes 64" in outcomes[-1].message


def test_a_missing_checkpoint_is_refused_before_a_worker_starts(char_tokenizer: Any) -> None:
    config = RewardModelScorer(path="./no/such/model")
    with pytest.raises(
        BadInputError, match=r"rewards\.scorers\.path='\./no/such/model': no checkpoint there"
    ):
        make_reward_model_scorer(config, "taste", char_tokenizer)
