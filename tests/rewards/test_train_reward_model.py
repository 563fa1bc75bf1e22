from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl_cluster.config.data import DataConfig, FileSource
from rl_cluster.config.run import ScratchModel
from rl_cluster.data.load import load_prompts
from rl_cluster.rewards.train_reward_model import (
    HELD_OUT_FILE,
    MISTAKES,
    TRAIN_FILE,
    Question,
    RewardModelRecipe,
    make_mistake,
    make_reward_model,
)

SMALL = RewardModelRecipe(
    num_digits=1,
    held_out=10,
    model=ScratchModel(hidden_size=32, intermediate_size=64, num_heads=2),
    steps=300,
    pairs_per_step=32,
    learning_rate=1e-2,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("reward")
    return folder, make_reward_model(folder, seed=1, recipe=SMALL)


def test_the_model_prefers_right_answers_about_numbers_it_never_saw(
    trained: tuple[Path, dict[str, float]],
) -> None:
    _, measured = trained
    assert measured["held_out_accuracy"] > 0.85
    assert set(measured) == {"loss", "held_out_accuracy", *(f"held_out_accuracy/{kind}" for kind in MISTAKES)}


def test_the_folder_is_an_ordinary_checkpoint_that_ranks_answers(
    trained: tuple[Path, dict[str, float]],
) -> None:
    folder, _ = trained
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def score(text: str) -> float:
        tokens = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([tokens])).logits[0, 0])

    wins = [
        score(f"{a} {b}={max(a, b)}") > score(f"{a} {b}={min(a, b)}")
        for a in range(10)
        for b in range(10)
        if a != b
    ]
    assert np.mean(wins) > 0.85


def test_the_questions_lie_beside_the_checkpoint_for_the_policy(
    trained: tuple[Path, dict[str, float]], tokenizer: Any
) -> None:
    folder, _ = trained
    source = FileSource(source="jsonl", path=str(folder / TRAIN_FILE), eval_path=str(folder / HELD_OUT_FILE))
    sets = load_prompts(DataConfig(train=source), tokenizer)
    assert len(sets.held_out) == 10
    assert {frozenset(p.text[:3].split()) for p in sets.train}.isdisjoint(
        frozenset(p.text[:3].split()) for p in sets.held_out
    )
    for prompt in (*sets.train, *sets.held_out):
        assert prompt.metadata["answer"] == max(prompt.text[:3].split())


def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    short = RewardModelRecipe(num_digits=1, held_out=10, model=SMALL.model, steps=20, warmup_steps=2)
    results = [make_reward_model(tmp_path / str(i), seed, short) for i, seed in enumerate((5, 5, 6))]
    assert results[0] == results[1] != results[2]


def test_a_mistake_is_never_the_right_answer_properly_ended() -> None:
    random = np.random.default_rng(0)
    seen = set()
    for answer, operands in [("7", ("5",)), ("42", ("11", "31")), ("100", ())] * 300:
        kind, text, ended = make_mistake(Question("?", answer, operands), list("0123456789="), random)
        seen.add(kind)
        assert not (ended and text == answer), kind
        assert kind != "operand" or not operands or text in operands
    assert seen == set(MISTAKES)
