from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from rl_cluster.config.run import ScratchModel
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_tokenizer, save_scratch_model
from rl_cluster.rewards.reward_model import RewardModel, check_reward_model, load_reward_model, plan_batches
from rl_cluster.trajectory import TrajectoryGroup

MakeGroup = Callable[..., TrajectoryGroup]
ALPHABET = "0123456789+-*/=() "


def save_classifier(folder: Path, alphabet: str = ALPHABET, num_labels: int = 1, **options: Any) -> Path:
    tokenizer = build_tokenizer(alphabet, 64)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=num_labels,
        initializer_range=0.3,
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, **options},
    )
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("reward") / "model", num_labels=2)


def direct(folder: Path, tokens: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([tokens])).logits[0, 0])


RESPONSES = ["2", "11", "(1+1)*1+0-0", "", "3 - 1 = 2 = 2 = 2"]


def test_scores_equal_transformers_one_by_one_whatever_shares_the_batch(
    checkpoint: Path, tokenizer: Any, make_group: MakeGroup
) -> None:
    group = make_group("1+1=", RESPONSES)
    expected = [direct(checkpoint, trajectory.tokens.tolist()) for trajectory in group.trajectories]
    assert np.std(expected) > 0.1
    for tokens_per_batch in (1, 40, 1000):
        model = load_reward_model(str(checkpoint), tokenizer, tokens_per_batch=tokens_per_batch)
        scores = model.score(model.encode(group))
        np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_padding_is_masked_in_models_that_look_ahead(tokenizer: Any, make_group: MakeGroup) -> None:
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=1,
        initializer_range=0.3,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    bert = BertForSequenceClassification(config).eval()
    model = RewardModel(bert, tokenizer, tokenizer, 1000)
    sequences = model.encode(make_group("1+1=", RESPONSES))
    with torch.no_grad():
        alone = [
            float(bert(input_ids=torch.tensor(ids[None].astype("int64"))).logits[0, 0]) for ids in sequences
        ]
    np.testing.assert_allclose(model.score(sequences), alone, rtol=1e-4, atol=1e-5)


def test_another_tokenizers_model_reads_the_text_anew(
    tmp_path: Path, tokenizer: Any, make_group: MakeGroup
) -> None:
    folder = save_classifier(tmp_path / "other", alphabet=ALPHABET[::-1])
    theirs = build_tokenizer(ALPHABET[::-1], 64)
    group = make_group("1+1=", ["2", "(1+1)"])
    model = load_reward_model(str(folder), tokenizer)
    expected = [theirs("1+1=" + text)["input_ids"] + [1] for text in ("2", "(1+1)")]
    assert [sequence.tolist() for sequence in model.encode(group)] == expected
    assert expected[0] != group.trajectories[0].tokens.tolist()
    np.testing.assert_allclose(
        model.score(model.encode(group)), [direct(folder, ids) for ids in expected], rtol=1e-5
    )


def test_half_precision_stays_close(checkpoint: Path, tokenizer: Any, make_group: MakeGroup) -> None:
    group = make_group("1+1=", RESPONSES)
    full, half = (load_reward_model(str(checkpoint), tokenizer, dtype=d) for d in ("float32", "bfloat16"))
    difference = np.abs(half.score(half.encode(group)) - full.score(full.encode(group)))
    assert 0 < difference.max() < 0.2


def test_without_a_pad_token_the_end_token_serves(
    tmp_path: Path, tokenizer: Any, make_group: MakeGroup
) -> None:
    folder = save_classifier(tmp_path / "no_pad", pad_token_id=None)
    strip_pad_from_tokenizer(folder)
    padded = shutil.copytree(folder, tmp_path / "eos_pad")
    config = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps({**config, "pad_token_id": 1}))
    group = make_group("1+1=", RESPONSES)
    model = load_reward_model(str(folder), tokenizer)
    expected = [direct(padded, trajectory.tokens.tolist()) for trajectory in group.trajectories]
    np.testing.assert_allclose(model.score(model.encode(group)), expected, rtol=1e-5)


def strip_pad_from_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in settings.items() if key != "pad_token"}))


def test_a_checkpoint_with_neither_pad_nor_end_token_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    folder = save_classifier(tmp_path / "bare", pad_token_id=None, eos_token_id=None)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    kept = {key: value for key, value in settings.items() if key not in ("pad_token", "eos_token")}
    path.write_text(json.dumps({**kept, "pad_token": None, "eos_token": None}))
    with pytest.raises(BadInputError, match="neither a pad nor an end token"):
        load_reward_model(str(folder), tokenizer)


def test_a_sequence_longer_than_the_models_positions_is_an_error(
    checkpoint: Path, tokenizer: Any, make_group: MakeGroup
) -> None:
    model = load_reward_model(str(checkpoint), tokenizer)
    with pytest.raises(ValueError, match="have 65 tokens, the reward model takes 64"):
        model.encode(make_group("1+1=", ["1" * 60]))


@pytest.mark.parametrize("path", ["./no/such/folder", "/no/such/folder", "a/b/c", "nowhere"])
def test_a_path_without_a_checkpoint_is_refused(path: str) -> None:
    with pytest.raises(BadInputError, match=r"rewards\.scorers\.path='.*': no checkpoint there"):
        check_reward_model(path)


def test_a_language_model_is_not_taken_for_a_reward_model(tmp_path: Path, tokenizer: Any) -> None:
    save_scratch_model(ScratchModel(hidden_size=32, intermediate_size=32), tmp_path)
    with pytest.raises(BadInputError, match="not a sequence-classification checkpoint but Qwen2ForCausalLM"):
        check_reward_model(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["Qwen2ForSequenceClassification"]})
    )
    with pytest.raises(BadInputError, match=r"it has no weights for score\.weight"):
        load_reward_model(str(tmp_path), tokenizer)


def test_broken_checkpoints_are_refused(tmp_path: Path, checkpoint: Path, tokenizer: Any) -> None:
    for name, content in [("config.json", b"{"), ("model.safetensors", b"short")]:
        folder = shutil.copytree(checkpoint, tmp_path / name)
        (folder / name).write_bytes(content)
        with pytest.raises(BadInputError, match=r"cannot be loaded"):
            load_reward_model(str(folder), tokenizer)


@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 120))
def test_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan_batches(lengths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget


def test_batches_are_as_full_as_the_budget_allows() -> None:
    assert plan_batches([3, 1, 2, 10, 2], 6) == [[1, 2, 4], [0], [3]]
