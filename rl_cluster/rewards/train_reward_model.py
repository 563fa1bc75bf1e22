"""A folder and a seed in; a small trained reward model (an ordinary Hugging Face folder) out.

The preferences are generated: of two answers about the same two numbers, the right one, properly ended, is
preferred to a wrong one (the other number, other digits, one digit off, too short, too long, garbage, or no
end token). Bradley-Terry loss, −log σ(r_chosen − r_rejected) (Christiano et al. 2017), plus a little r² that
centres the scores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import logsigmoid
from transformers import Qwen2ForSequenceClassification

from rl_cluster.config.data import AdditionSource
from rl_cluster.config.run import ScratchModel
from rl_cluster.data.addition import make_addition
from rl_cluster.data.demonstrations import wrong_answer
from rl_cluster.data.rows import Row
from rl_cluster.files.atomic import folder_atomically
from rl_cluster.files.own_folders import folder_to_write
from rl_cluster.modeling.scratch import EOS, build_model, build_tokenizer

CENTRE = 0.001
"""Weight of the mean squared score in the loss."""

MISTAKES = {
    "operand": 0.2,
    "other_number": 0.2,
    "one_digit_off": 0.2,
    "too_short": 0.1,
    "too_long": 0.1,
    "no_end": 0.1,
    "garbage": 0.1,
}
"""Kinds of wrong answers and their shares."""

PAIRS_PER_HELD_OUT_ROW = 5

TRAIN_FILE, HELD_OUT_FILE = "train.jsonl", "held_out.jsonl"
"""Beside the checkpoint: the questions, columns prompt and answer, for training a policy on it."""

TASKS: dict[str, Callable[[int, int], int]] = {"max": max, "sum": lambda a, b: a + b}
"""The right answer about two numbers: the larger one, or their sum (which takes far longer to learn)."""

Vocabulary = Mapping[str, int]
"""Character, or EOS, -> token id."""


@dataclass(frozen=True)
class RewardModelRecipe:
    """Which question, which model, how long.

    task: a key of TASKS. num_digits: of both numbers. held_out: pairs of numbers kept from training.
    """

    task: str = "max"
    template: str = "{a} {b}="
    num_digits: int = 2
    held_out: int = 200
    model: ScratchModel = field(default_factory=lambda: ScratchModel(hidden_size=64, intermediate_size=256))
    steps: int = 1000
    pairs_per_step: int = 64
    learning_rate: float = 1e-3
    warmup_steps: int = 50


@dataclass(frozen=True)
class Question:
    """operands: those of the two numbers that are not the answer, so plausible mistakes."""

    prompt: str
    answer: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """Two token sequences for the same prompt, the better one and the other; kind: what is wrong with it."""

    chosen: list[int]
    rejected: list[int]
    kind: str


def make_reward_model(
    folder: Path, seed: int = 0, recipe: RewardModelRecipe | None = None
) -> dict[str, float]:
    """Train on some pairs of numbers, measure on others; save checkpoint, tokenizer and the questions.

    Returns held_out_accuracy (share of pairs where the right answer scores higher), the same per kind of
    mistake as held_out_accuracy/KIND, and loss (mean of the last 50 steps). One process, CPU.
    """
    recipe = recipe or RewardModelRecipe()
    target = folder_to_write(folder, "folder", "model")
    tokenizer = build_tokenizer(recipe.model.alphabet, recipe.model.max_positions)
    vocabulary = {letter: tokenizer(letter)["input_ids"][0] for letter in recipe.model.alphabet}
    vocabulary[EOS] = tokenizer.eos_token_id
    source = AdditionSource(source="addition", num_digits=recipe.num_digits, template=recipe.template)
    train, held_out = (_questions(rows, recipe.task) for rows in make_addition(source, recipe.held_out))
    model = _build(recipe.model, len(tokenizer), seed)
    loss = _train(model, train, vocabulary, seed, recipe)
    accuracy = _evaluate(model, held_out, vocabulary, seed)
    with folder_atomically(target, "model") as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        _write_prompts(fresh / TRAIN_FILE, train)
        _write_prompts(fresh / HELD_OUT_FILE, held_out)
    return {"loss": loss, **accuracy}


def _questions(rows: Sequence[Row], task: str) -> list[Question]:
    questions = []
    for row in rows:
        numbers = row.metadata["a"], row.metadata["b"]
        answer = str(TASKS[task](*numbers))
        questions.append(Question(row.prompt, answer, tuple({str(n) for n in numbers} - {answer})))
    return questions


def _write_prompts(path: Path, questions: Sequence[Question]) -> None:
    lines = [json.dumps({"prompt": question.prompt, "answer": question.answer}) for question in questions]
    path.write_text("\n".join(lines) + "\n")


def _build(scratch: ScratchModel, vocab_size: int, seed: int) -> Qwen2ForSequenceClassification:
    config = build_model(scratch, vocab_size, seed).config
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForSequenceClassification(config)


def _train(
    model: Any, rows: Sequence[Question], vocabulary: Vocabulary, seed: int, recipe: RewardModelRecipe
) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=recipe.learning_rate,
        total_steps=recipe.steps,
        pct_start=recipe.warmup_steps / recipe.steps,
    )
    random = np.random.default_rng([seed, 0])
    losses = []
    model.train()
    for _ in range(recipe.steps):
        drawn = random.integers(len(rows), size=recipe.pairs_per_step)
        pairs = [make_pair(rows[row], vocabulary, random) for row in drawn]
        chosen, rejected = pair_scores(model, pairs)
        loss = -logsigmoid(chosen - rejected).mean() + CENTRE * (chosen**2 + rejected**2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return float(np.mean(losses[-50:]))


@torch.no_grad()
def _evaluate(model: Any, rows: Sequence[Question], vocabulary: Vocabulary, seed: int) -> dict[str, float]:
    model.eval()
    random = np.random.default_rng([seed, 1])
    pairs = [make_pair(row, vocabulary, random) for row in rows for _ in range(PAIRS_PER_HELD_OUT_ROW)]
    chosen, rejected = pair_scores(model, pairs)
    right = (chosen > rejected).numpy()
    kinds = np.array([pair.kind for pair in pairs])
    by_kind = {f"held_out_accuracy/{kind}": float(right[kinds == kind].mean()) for kind in MISTAKES}
    return {"held_out_accuracy": float(right.mean()), **by_kind}


def make_pair(question: Question, vocabulary: Vocabulary, random: np.random.Generator) -> Pair:
    """The right answer against a wrong one."""
    answer, eos = question.answer, [vocabulary[EOS]]
    kind, wrong, ended = make_mistake(question, sorted(set(vocabulary) - {EOS}), random)
    prompt, right, other = (
        [vocabulary[letter] for letter in text] for text in (question.prompt, answer, wrong)
    )
    return Pair(chosen=prompt + right + eos, rejected=prompt + other + (eos if ended else []), kind=kind)


def make_mistake(
    question: Question, alphabet: Sequence[str], random: np.random.Generator
) -> tuple[str, str, bool]:
    """(kind, text, whether it ends with an end token); with an end token, the text is not the answer."""
    answer = question.answer
    kind = str(random.choice(list(MISTAKES), p=list(MISTAKES.values())))
    if kind == "operand" and question.operands:
        return kind, str(random.choice(sorted(question.operands))), True
    if kind in ("operand", "other_number"):
        return kind, wrong_answer(answer, int(random.integers(2**31)), ""), True
    if kind == "one_digit_off":
        place = int(random.integers(len(answer)))
        digit = str((int(answer[place]) + int(random.integers(1, 10))) % 10)
        return kind, answer[:place] + digit + answer[place + 1 :], True
    if kind == "too_short":
        return kind, answer[: int(random.integers(len(answer)))], True
    garbage = "".join(random.choice(alphabet, size=int(random.integers(1, 6))))
    if kind == "too_long":
        return kind, answer + garbage, True
    if kind == "no_end":
        return kind, answer + garbage, False
    return kind, garbage if garbage != answer else garbage + alphabet[0], True


def pair_scores(model: Any, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 [n], float32 [n]): scores of the better and of the worse sequences, in one forward pass."""
    sequences = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    longest = max(len(sequence) for sequence in sequences)
    pad = model.config.pad_token_id
    tokens = torch.tensor([sequence + [pad] * (longest - len(sequence)) for sequence in sequences])
    logits = model(input_ids=tokens, attention_mask=(tokens != pad).long()).logits[:, 0]
    chosen, rejected = logits.chunk(2)
    return chosen, rejected


if __name__ == "__main__":
    # python -m rl_cluster.rewards.train_reward_model FOLDER [SEED]
    print(json.dumps(make_reward_model(Path(sys.argv[1]), int([*sys.argv, "0"][2])), indent=1))
