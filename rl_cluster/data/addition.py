"""n-digit addition: the settings in, training rows and held-out rows that share no pair of operands out."""

from __future__ import annotations

from rl_cluster.config.data import AdditionSource
from rl_cluster.data.randomness import hash_bits, permutation
from rl_cluster.data.rows import Row
from rl_cluster.errors import BadInputError

Pair = tuple[int, int]

MAX_ENUMERATED = 1_000_000
"""Up to so many pairs they are listed; beyond, they are drawn."""


def make_addition(source: AdditionSource, held_out: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """(training rows, held-out rows); a + b and b + a are the same pair and fall on the same side.

    Operands have exactly `num_digits` digits (0 to 9 for one). Training has both orders of each of its
    pairs, at most `size` rows; the held-out side has one order of each. The split is the same in every
    run, whatever its seed, so that runs can be compared and a later evaluation never meets a trained pair.
    """
    _check_template(source.template)
    low = 0 if source.num_digits == 1 else 10 ** (source.num_digits - 1)
    count = 10**source.num_digits - low
    num_pairs = count * (count + 1) // 2
    if held_out >= num_pairs:
        raise BadInputError(
            f"data.held_out={held_out}: there are only {num_pairs} pairs of {source.num_digits}-digit "
            "operands. Hold out fewer than that."
        )
    pairs = _pairs(low, count, num_pairs, wanted=held_out + source.size)
    eval_pairs, train_pairs = pairs[:held_out], pairs[held_out : held_out + source.size]
    ordered = [pair for a, b in train_pairs for pair in ([(a, b)] if a == b else [(a, b), (b, a)])]
    chosen = [ordered[i] for i in permutation(len(ordered), "addition order")][: source.size]
    flips = [hash_bits("addition flip", a, b, bits=1) for a, b in eval_pairs]
    evaluated = [(b, a) if flip else (a, b) for (a, b), flip in zip(eval_pairs, flips, strict=True)]
    return _rows(source, chosen), _rows(source, evaluated)


def _check_template(template: str) -> None:
    try:
        filled = template.format(a=111, b=222)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise BadInputError(
            f"data.train.template={template!r}: cannot be filled ({type(error).__name__}: {error}). "
            "It may contain {a} and {b}; write a literal brace twice."
        ) from error
    if "111" not in filled or "222" not in filled:
        raise BadInputError(f"data.train.template={template!r}: must contain both {{a}} and {{b}}.")


def _pairs(low: int, count: int, num_pairs: int, wanted: int) -> list[Pair]:
    """Distinct pairs a ≤ b in a fixed random order, at least min(wanted, num_pairs) of them."""
    if num_pairs <= MAX_ENUMERATED:
        listed = [(low + i, low + j) for i in range(count) for j in range(i, count)]
        return [listed[i] for i in permutation(num_pairs, "addition split")]
    drawn: dict[Pair, None] = {}
    draw = 0
    while len(drawn) < min(wanted, num_pairs // 2):
        a, b = (low + _below(count, "addition draw", draw, side) for side in (0, 1))
        drawn[(min(a, b), max(a, b))] = None
        draw += 1
    return list(drawn)


def _below(limit: int, *key: int | str) -> int:
    """A number in [0, limit) of any size; the bias of the remainder is below 2**-64."""
    parts = limit.bit_length() // 64 + 2
    value = 0
    for part in range(parts):
        value = (value << 64) | hash_bits(*key, part, bits=64)
    return value % limit


def _rows(source: AdditionSource, pairs: list[Pair]) -> tuple[Row, ...]:
    rows = []
    for a, b in pairs:
        text = source.template.format(a=a, b=b)
        prompt = [{"role": "user", "content": text}] if source.chat else text
        answer = f"{a + b:0{source.answer_digits}d}"
        rows.append(Row(f"addition: {a}+{b}", prompt, {"answer": answer, "a": a, "b": b}))
    return tuple(rows)
