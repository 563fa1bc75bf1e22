"""The built-in scorers: prompts, responses and metadata of n samples in, n scores out.

They have the signature of a user's own function, `f(prompts, responses, metadata, **options)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rl_cluster.rewards.mathematics import OF_THIS_PROCESS, Unreadable

_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_TEXT = re.compile(r"\\text\w*\s*\{([^{}]*)\}")
_ANSWER = re.compile(r"answer(?: is)?[ \t]*:?[ \t]+([^\n]+)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.)])-?\d[\d,]*(?:\.\d+)?|\d[\d,]*(?:\.\d+)?")


def exact_match(
    prompts: Sequence[str],
    responses: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    answer_key: str = "answer",
    extract: str = "all",
) -> list[float]:
    """1.0 where the response is metadata[answer_key], white space around it aside, else 0.0.

    extract="last_number": compare the last number of the response, as a number, so 42.0 equals 42.
    KeyError if the answer is missing.
    """
    score = {"all": _equals_all, "last_number": _equals_last_number}[extract]
    pairs = zip(responses, metadata, strict=True)
    return [float(score(response, str(row[answer_key]))) for response, row in pairs]


def last_number(text: str) -> Decimal | None:
    """The last number in a text (1,234.50 and -7 are numbers; in 5-3 the minus is not a sign)."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _equals_all(response: str, answer: str) -> bool:
    return response.strip() == answer.strip()


def _equals_last_number(response: str, answer: str) -> bool:
    wanted = last_number(answer)
    if wanted is None:
        raise ValueError(f"extract=last_number: the answer {answer!r} contains no number")
    return last_number(response) == wanted


def math_match(
    prompts: Sequence[str],
    responses: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    answer_key: str = "answer",
    unreadable: str = "refuse",
) -> list[float]:
    """1.0 where math-verify finds the response equivalent to metadata[answer_key], else 0.0.

    It reads them in a child process with limits (rewards/mathematics.py): a response that takes too long or
    too much memory to understand is wrong. unreadable: what becomes of a right answer that is no mathematics:
    "refuse" (ValueError) or "exact_text" (compared as text, see text_match).
    """
    answers = [str(row[answer_key]) for row in metadata]
    pairs = list(zip(answers, responses, strict=True))
    scores = []
    for (answer, response), verdict in zip(pairs, OF_THIS_PROCESS.check(pairs), strict=True):
        if not isinstance(verdict, Unreadable):
            scores.append(float(verdict))
        elif unreadable == "exact_text":
            scores.append(float(text_match(answer, response)))
        else:
            raise ValueError(
                f"math: the right answer {answer!r} is not a mathematical expression: it {verdict.why}"
            )
    return scores


def text_match(answer: str, response: str) -> bool:
    """Whether the response, its last \\boxed{…} or what follows its last "Answer:" is the answer, as text.

    Case, white space, $, \\text{…} and a full stop at the end do not count. An empty answer matches nothing.
    """
    wanted = _plain(answer)
    found = [response, *_BOXED.findall(response)[-1:], *_ANSWER.findall(response)[-1:]]
    return wanted != "" and wanted in [_plain(text) for text in found]


def _plain(text: str) -> str:
    for wrapped in (_TEXT, _BOXED):
        text = wrapped.sub(r"\1", text)
    return " ".join(text.replace("$", " ").casefold().split()).removesuffix(".").rstrip()


def reasoning_gym_score(
    prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The family's own score_answer, 0 to 1, on the text in <answer>…</answer> if there is such, else on all.

    metadata is that of the reasoning_gym source: family, options, entry.
    """
    from reasoning_gym.utils import extract_answer

    scores = []
    for response, row in zip(responses, metadata, strict=True):
        family = _family(row["family"], json.dumps(row["options"], sort_keys=True))
        tagged = extract_answer(response)
        answer = response.strip() if tagged is None else tagged
        scores.append(float(family.score_answer(answer, row["entry"])))
    return scores


@lru_cache(maxsize=32)
def _family(family: str, options: str) -> Any:
    from rl_cluster.data.gym_families import open_family

    return open_family(family, json.loads(options), size=1)
