"""Do DPOTrainer, ORPOTrainer, KTOTrainer and RewardTrainer learn what depends on the prompt?

    python bench/trainers_fit.py [--seeds 3] [--epochs 12]

The chosen response echoes the last digit of a three-digit prompt, the rejected is any other digit. 900 pairs
to train on, 180 pairs of 60 other prompts held out. A char-level model with random weights, no download.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_cluster import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    ORPOConfig,
    ORPOTrainer,
    RewardConfig,
    RewardTrainer,
)
from rl_cluster.config.run import ScratchModel
from rl_cluster.modeling.scratch import build_model, build_tokenizer

SCRATCH = ScratchModel(
    alphabet="0123456789>", hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128, max_positions=16
)
TOKENIZER = build_tokenizer(SCRATCH.alphabet, SCRATCH.max_positions)


def make_pairs(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training pairs, held-out pairs); no prompt is in both."""
    rng = np.random.default_rng(seed)
    pairs = []
    for number in rng.permutation(1000)[:360]:
        for step in rng.permutation(np.arange(1, 10))[:3]:
            last = number % 10
            pairs.append(
                {"prompt": f"{number:03d}>", "chosen": str(last), "rejected": str((last + step) % 10)}
            )
    return pairs[:900], pairs[900:]


@torch.no_grad()
def preferred(model: Any, pairs: list[dict[str, str]]) -> float:
    """Share of pairs whose chosen digit is the likelier, by a plain forward pass."""
    wins = 0
    for pair in pairs:
        logits = model(torch.tensor([TOKENIZER(pair["prompt"])["input_ids"]])).logits[0, -1]
        chosen, rejected = (TOKENIZER(pair[side])["input_ids"][0] for side in ("chosen", "rejected"))
        wins += bool(logits[chosen] > logits[rejected])
    return wins / len(pairs)


def held_out(name: str, seed: int, epochs: int) -> float:
    """Accuracy on held-out pairs after training."""
    train, test = make_pairs(seed)
    model = build_model(SCRATCH, len(TOKENIZER), seed)
    settings: dict[str, Any] = {
        "learning_rate": 3e-3,
        "batch_size": 32,
        "gradient_accumulation_steps": 1,
        "num_epochs": epochs,
        "max_length": 8,
        "max_prompt_length": 5,
        "eval_every": 0,
        "save_every": 0,
        "seed": seed,
        "progress": "none",
        "report_to": "none",
        "output_dir": str(Path(tempfile.mkdtemp()) / "run"),
    }
    if name == "reward":
        trainer = RewardTrainer(RewardConfig(**settings), model, TOKENIZER)
        trainer.train(train)
        return float(trainer.evaluate(test)["eval_accuracy"] or 0.0)
    if name == "kto":
        rows = [
            {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for pair in train
            for side in ("chosen", "rejected")
        ]
        KTOTrainer(KTOConfig(**settings | {"batch_size": 64}), model, TOKENIZER).train(rows)
    elif name == "orpo":
        ORPOTrainer(ORPOConfig(**settings), model, TOKENIZER).train(train)
    else:
        DPOTrainer(DPOConfig(**settings), model, TOKENIZER).train(train)
    return preferred(model, test)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    print("| trainer | held-out accuracy by seed | seconds |\n|---|---|---:|", flush=True)
    for name in ("dpo", "orpo", "kto", "reward"):
        begun = time.perf_counter()
        scores = [held_out(name, seed, options.epochs) for seed in range(options.seeds)]
        seconds = time.perf_counter() - begun
        print(f"| {name} | {', '.join(f'{s:.3f}' for s in scores)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
