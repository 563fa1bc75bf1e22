"""Something that scores texts (a reward model, a classifier, a function) in, a judge of pairs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.environments.playing.text_scores import text_scores
from rl_cluster.judge.verdicts import Judge


def score_judge(model: Any, tokenizer: Any = None, *, tie_margin: float = 0.0) -> Judge:
    """The response whose prompt + response scores higher wins; closer than tie_margin (in scores) is a tie.

    model: a RewardModel, a transformers sequence classifier (both need their tokenizer) or a function
    f(list of texts) -> list of scores. Such a judge has no liking for a place: the swap changes nothing.
    """
    check_number("score_judge.tie_margin", tie_margin, at_least=0.0)
    scores = text_scores(model, tokenizer, "judge")

    def judge(prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[float | None]:
        better = scores([p + r for p, r in zip(prompts, first, strict=True)])
        worse = scores([p + r for p, r in zip(prompts, second, strict=True)])
        return [verdict(a - b, tie_margin) for a, b in zip(better, worse, strict=True)]

    return judge


def verdict(difference: float, tie_margin: float) -> float:
    """1 for a difference above the margin, 0 below its negative, 0.5 within."""
    if abs(difference) <= tie_margin:
        return 0.5
    return float(difference > 0)
