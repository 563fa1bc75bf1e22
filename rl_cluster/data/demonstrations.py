"""Prompts with known answers in, a TokenBatch to imitate (prompt, answer, end token) out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_cluster.batch import TokenBatch
from rl_cluster.data.encode import special_tokens, unknown_characters
from rl_cluster.data.randomness import hash_bits, permutation
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt


def demonstrations(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    correct_fraction: float = 1.0,
    seed: int = 0,
    answer_key: str = "answer",
) -> TokenBatch:
    """One row per prompt, in order; action_mask is True on the answer's tokens and the end token.

    A share of `correct_fraction` of the rows (to the nearest row, chosen by the seed) shows the right
    answer, the others a plausible wrong one. BadInputError where a prompt has no answer.
    """
    eos = special_tokens(tokenizer).eos
    answers = [_answer(prompt, answer_key) for prompt in prompts]
    num_wrong = len(prompts) - round(correct_fraction * len(prompts))
    for index in permutation(len(prompts), "wrong answers", seed)[:num_wrong]:
        answers[index] = wrong_answer(answers[index], seed, prompts[index].prompt_id)
    example_of = dict(zip(answers, prompts, strict=True))  # generated answers repeat: encode each once
    encoded = {answer: _encode(answer, prompt, tokenizer) for answer, prompt in example_of.items()}
    responses = [[*encoded[answer], eos] for answer in answers]
    return _batch([prompt.tokens for prompt in prompts], responses)


def wrong_answer(answer: str, seed: int, key: str) -> str:
    """The answer with one character changed: a slip, not a guess.

    One digit becomes another (the first of several never 0, unless it was); in an answer without digits,
    one character becomes another of the answer or of the alphabet.
    """
    places = [i for i, character in enumerate(answer) if character.isdecimal() and character.isascii()]
    if not places:
        return _wrong_word(answer, seed, key)
    place = places[hash_bits("wrong place", seed, key, bits=32) % len(places)]
    leading = place == places[0] and len(places) > 1 and answer[place] != "0"
    others = [digit for digit in ("123456789" if leading else "0123456789") if digit != answer[place]]
    return _changed(answer, place, others, seed, key)


def _wrong_word(answer: str, seed: int, key: str) -> str:
    letters = sorted(set(answer) - {" "} | set("abc"))
    place = hash_bits("wrong place", seed, key, bits=32) % len(answer)
    return _changed(answer, place, [letter for letter in letters if letter != answer[place]], seed, key)


def _changed(answer: str, place: int, others: Sequence[str], seed: int, key: str) -> str:
    other = others[hash_bits("wrong character", seed, key, bits=32) % len(others)]
    return answer[:place] + other + answer[place + 1 :]


def _answer(prompt: Prompt, answer_key: str) -> str:
    answer = prompt.metadata.get(answer_key)
    if not isinstance(answer, str | int | float) or not str(answer).strip():
        raise BadInputError(
            f"model.supervised: {prompt.prompt_id} has no {answer_key!r} to demonstrate "
            f"(found {answer!r:.40}). Give the data an answer column, or leave model.supervised out."
        )
    return str(answer)


def _encode(answer: str, prompt: Prompt, tokenizer: Any) -> list[int]:
    ids = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    if unknown := unknown_characters(tokenizer, answer, ids):
        raise BadInputError(
            f"model.supervised: {prompt.prompt_id} has the answer {answer!r:.40}, and the tokenizer does not "
            f"know {unknown}. Add it to model.scratch.alphabet, or correct the answer."
        )
    return ids


def _batch(prompts: Sequence[np.ndarray], responses: Sequence[Sequence[int]]) -> TokenBatch:
    tokens = [np.concatenate([p, np.asarray(r)]) for p, r in zip(prompts, responses, strict=True)]
    masks = [np.arange(len(t)) >= len(p) for t, p in zip(tokens, prompts, strict=True)]
    rows = np.arange(len(tokens), dtype=np.int32)
    return TokenBatch(
        tokens=np.concatenate(tokens).astype(np.int32),
        lengths=np.array([len(t) for t in tokens], dtype=np.int32),
        action_mask=np.concatenate(masks),
        units=rows,
        group_ids=rows.copy(),
    )
