"""The built-in scorers: prompts, responses and metadata of n samples in, n scores out.

They have the signature of a user's own function, `f(prompts, responses, metadata, **options)`.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

MATH_TIMEOUT_SECONDS = 5
"""For parsing and for comparing one answer, where the process allows a limit."""

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
) -> list[float]:
    """1.0 where math-verify finds the response equivalent to metadata[answer_key], else 0.0.

    In the main thread of a process an answer that takes longer than MATH_TIMEOUT_SECONDS to understand
    is wrong; elsewhere math-verify has no limit (it uses SIGALRM) and the scorer's own deadline counts.
    ValueError if the right answer itself cannot be understood.
    """
    pairs = zip(responses, metadata, strict=True)
    return [float(_math_equal(str(row[answer_key]), response)) for response, row in pairs]


def _math_equal(answer: str, response: str) -> bool:
    import math_verify

    # Without a limit math-verify warns once per process; the limit is then the scorer's.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    seconds = MATH_TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else 0
    gold = _parse_gold(answer, seconds)
    parsed = math_verify.parse(response, parsing_timeout=seconds)
    return bool(math_verify.verify(gold, parsed, timeout_seconds=seconds))


def _parse_gold(answer: str, seconds: int) -> Any:
    import math_verify

    for text in (answer, f"${answer}$"):
        if parsed := math_verify.parse(text, parsing_timeout=seconds):
            return parsed
    raise ValueError(f"math: the right answer {answer!r} is not a mathematical expression")


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
