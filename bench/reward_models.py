"""Do the reward models learn? Seeds in, held-out scores of each kind on a generated task out.

    python bench/reward_models.py [SEED ...]      # default: 0 1 2

The task: a prompt of 3 to 6 digits and "=", whose right response is the prompt's last digit. A wrong response
is another digit, half of the time one of the prompt's; so the preference cannot be told from the response
alone. Held-out prompts are never trained on. Models are random at the start and have about 0.1 M parameters.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel, Qwen2Config, Qwen2Model

from rl_cluster.modeling.scratch import build_tokenizer
from rl_cluster.reward_models import (
    MultiObjectiveRewardModel,
    PairwiseRewardModel,
    RewardModel,
    RewardModelConfig,
    RewardModelTrainer,
)

DIGITS = "0123456789"
TOKENIZER = build_tokenizer(DIGITS + "=", 16)
SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Pairs:
    """Texts: prompt and the right response; prompt and a wrong one."""

    chosen: list[str]
    rejected: list[str]


def make_pairs(num_pairs: int, num_held_out: int, seed: int) -> tuple[Pairs, Pairs]:
    """(pairs to train on, held-out pairs), no prompt in both."""
    draw = random.Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < num_pairs + num_held_out:
        prompts["".join(draw.choices(DIGITS, k=draw.randint(3, 6))) + "="] = None
    chosen, rejected = [], []
    for prompt in prompts:
        right = prompt[-2]
        plausible = draw.random() < 0.5
        others = [digit for digit in (prompt[:-1] if plausible else DIGITS) if digit != right]
        chosen.append(prompt + right)
        rejected.append(prompt + draw.choice(others or [digit for digit in DIGITS if digit != right]))
    cut = num_held_out
    return Pairs(chosen[cut:], rejected[cut:]), Pairs(chosen[:cut], rejected[:cut])


def make_decoder(seed: int) -> Qwen2Model:
    torch.manual_seed(seed)
    return Qwen2Model(Qwen2Config(**SIZES, num_key_value_heads=4))


def make_encoder(seed: int) -> BertModel:
    torch.manual_seed(seed)
    return BertModel(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def targets_of(texts: list[str]) -> list[list[float]]:
    """Three objectives: is it right, how large is the response, how long is the prompt."""
    return [[float(t[-1] == t[-3]), int(t[-1]) / 9, (len(t) - 2) / 6] for t in texts]


def pair_accuracy(
    kind: type[RewardModel], make_base: Callable[[int], Any], seed: int, num_pairs: int = 2400, **fields: Any
) -> float:
    """Held-out share of pairs on the right side, of a model of this kind trained on preferences."""
    config = RewardModelConfig(**{"learning_rate": 1e-3, "warmup_steps": 30, "seed": seed, **fields})
    train, held_out = make_pairs(num_pairs, 300, seed)
    trainer = RewardModelTrainer(kind(config, base_model=make_base(seed)), TOKENIZER, config)
    trainer.train_on_preferences(train.chosen, train.rejected, num_epochs=4, batch_size=32)
    return trainer.evaluate(held_out.chosen, held_out.rejected, batch_size=100)["eval_accuracy"]


def objective_scores(seed: int, num_pairs: int = 2400) -> list[float]:
    """Held-out R² of each objective of a MultiObjectiveRewardModel trained on targets."""
    config = RewardModelConfig(learning_rate=1e-3, warmup_steps=30, seed=seed, dropout_prob=0.0)
    train, held_out = make_pairs(num_pairs, 300, seed)
    model = MultiObjectiveRewardModel(config, base_model=make_decoder(seed))
    trainer = RewardModelTrainer(model, TOKENIZER, config)
    texts = train.chosen + train.rejected
    trainer.train_on_targets(texts, targets_of(texts), num_epochs=4, batch_size=64)
    texts = held_out.chosen + held_out.rejected
    wanted = np.array(targets_of(texts))
    got = np.array(model.predict_rewards(texts, TOKENIZER, batch_size=100))
    squares = ((got - wanted) ** 2).sum(axis=0) / ((wanted - wanted.mean(axis=0)) ** 2).sum(axis=0)
    return (1 - squares).tolist()


RUNS: dict[str, Callable[[int], float]] = {
    "RewardModel, decoder, last": lambda seed: pair_accuracy(RewardModel, make_decoder, seed),
    "RewardModel, encoder, cls": lambda seed: pair_accuracy(
        RewardModel, make_encoder, seed, pooling_strategy="cls"
    ),
    "RewardModel, encoder, mean": lambda seed: pair_accuracy(
        RewardModel, make_encoder, seed, pooling_strategy="mean"
    ),
    "PairwiseRewardModel, decoder, last": lambda seed: pair_accuracy(PairwiseRewardModel, make_decoder, seed),
    "MultiObjectiveRewardModel, decoder, lowest R² of 3": lambda seed: min(objective_scores(seed)),
}


def main(seeds: list[int]) -> int:
    worst = 1.0
    for name, score in RUNS.items():
        start = time.perf_counter()
        scores = [score(seed) for seed in seeds]
        seconds = (time.perf_counter() - start) / len(seeds)
        print(f"{name}: {', '.join(f'{s:.3f}' for s in scores)} ({seconds:.0f} s each)", flush=True)
        worst = min(worst, *scores)
    return 0 if worst >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main([int(seed) for seed in sys.argv[1:]] or [0, 1, 2]))
