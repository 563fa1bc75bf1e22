"""Pairs of responses and a judge in, what it said about each pair, in both orders, out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_cluster.errors import BadInputError, ScorerError

Judge = Callable[[Sequence[str], Sequence[str], Sequence[str]], Sequence[float | None]]
"""f(prompts, first, second) -> for each pair how far the first response is the better one.

1: the first, 0: the second, 0.5: a tie, anything between: a probability. None: the judge gave no answer.
"""


@dataclass(frozen=True)
class PairVerdict:
    """What the judge said of (candidate, reference). Numbers are those of Judge, None for no answer.

    candidate_first: with the candidate in first place. candidate_second: with the places swapped, already
    turned so that 1 means the candidate; None too if it was not asked.
    """

    candidate_first: float | None
    candidate_second: float | None
    swapped: bool

    @property
    def outcome(self) -> float | None:
        """The mean of both orders: 1 a win of the candidate, 0 a loss, 0.5 a tie, also where the judge chose
        the same place twice. None where an answer is missing."""
        if not self.swapped:
            return self.candidate_first
        if self.candidate_first is None or self.candidate_second is None:
            return None
        return 0.5 * (self.candidate_first + self.candidate_second)


def judge_pairs(
    judge: Judge,
    prompts: Sequence[str],
    candidate: Sequence[str],
    reference: Sequence[str],
    *,
    swap: bool = True,
) -> list[PairVerdict]:
    """One verdict per prompt. swap: ask twice, with the places exchanged, so that a liking for one cancels.

    BadInputError for empty or unequal lists; ScorerError for a judge that answers a wrong number of verdicts
    or something outside 0 to 1.
    """
    if not prompts or not len(prompts) == len(candidate) == len(reference):
        raise BadInputError(
            f"judge: {len(prompts)} prompts, {len(candidate)} candidate and {len(reference)} reference "
            "responses. Give as many of each, at least one."
        )
    first = _ask(judge, prompts, candidate, reference)
    if not swap:
        return [PairVerdict(verdict, None, False) for verdict in first]
    second = [None if v is None else 1.0 - v for v in _ask(judge, prompts, reference, candidate)]
    return [PairVerdict(a, b, True) for a, b in zip(first, second, strict=True)]


def _ask(
    judge: Judge, prompts: Sequence[str], first: Sequence[str], second: Sequence[str]
) -> list[float | None]:
    answers = list(judge(prompts, first, second))
    if len(answers) != len(prompts):
        raise ScorerError("judge", f"answered {len(answers)} verdicts for {len(prompts)} pairs")
    return [_checked(answer) for answer in answers]


def _checked(answer: Any) -> float | None:
    if answer is None:
        return None
    value = float(answer)
    if math.isnan(value) or not 0.0 <= value <= 1.0:
        raise ScorerError("judge", f"answered {answer!r}; a verdict lies between 0 and 1, or is None")
    return value
