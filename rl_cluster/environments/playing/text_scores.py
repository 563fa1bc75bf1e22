"""A reward or preference model of any of the usual kinds in; scores of texts, or of a pair of them, out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_cluster.environments.playing.reward_calls import finite_number
from rl_cluster.errors import BadInputError

TextScores = Callable[[Sequence[str]], list[float]]
"""f(texts) -> one score per text; higher is better."""


def text_scores(model: Any, tokenizer: Any, field: str = "reward_model") -> TextScores:
    """How to score texts with `model`, which is one of

    a RewardModel (`predict_rewards(texts, tokenizer)`), a transformers sequence classifier (its first logit),
    or any function f(list of texts) -> list of numbers. Models run without gradient, as they are on their
    device. BadInputError at a call whose answer has the wrong length or is not finite.
    """
    if hasattr(model, "predict_rewards"):
        raw: Callable[[list[str]], Any] = lambda texts: model.predict_rewards(texts, tokenizer)  # noqa: E731
    elif isinstance(model, torch.nn.Module):
        raw = lambda texts: first_logits(model, tokenizer, texts)  # noqa: E731
    elif callable(model):
        raw = model
    else:
        raise BadInputError(
            f"{field} is {type(model).__name__}: a reward model, a sequence classifier or a function "
            "f(list of texts) -> list of scores is needed."
        )

    def scores(texts: Sequence[str]) -> list[float]:
        answer = [_single(value) for value in raw(list(texts))]
        if len(answer) != len(texts):
            raise BadInputError(f"{field} returned {len(answer)} scores for {len(texts)} texts.")
        return [finite_number(f"{field} scored", v, t) for v, t in zip(answer, texts, strict=True)]

    return scores


def _single(value: Any) -> Any:
    """A list of one number is that number (predict_rewards answers lists of lists)."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def first_logits(model: Any, tokenizer: Any, texts: Sequence[str]) -> list[float]:
    """The first logit of each text, one text at a time, so that neither padding nor company matters."""
    was_training = model.training
    model.eval()
    try:
        return [_first_logit(model, tokenizer, text) for text in texts]
    finally:
        model.train(was_training)


@torch.no_grad()
def _first_logit(model: Any, tokenizer: Any, text: str) -> float:
    encoded = tokenizer(text, return_tensors="pt")
    device = next(model.parameters()).device
    output = model(
        input_ids=encoded["input_ids"].to(device), attention_mask=encoded["attention_mask"].to(device)
    )
    return float(output.logits.reshape(-1)[0])


@torch.no_grad()
def pair_score(model: Any, tokenizer: Any, first: str, second: str) -> float:
    """forward_pair of a PairwiseRewardModel: above 0 where it prefers the first text."""
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        a, b = (tokenizer(text, return_tensors="pt").to(device) for text in (first, second))
        answer = model.forward_pair(a["input_ids"], a["attention_mask"], b["input_ids"], b["attention_mask"])
    finally:
        model.train(was_training)
    return float(answer.reshape(-1)[0])
