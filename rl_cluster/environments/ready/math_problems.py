"""A level, a number and a seed in; that many arithmetic and algebra problems with exact answers out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from rl_cluster.environments.ready.text_generation import LEVELS
from rl_cluster.errors import BadInputError


@dataclass(frozen=True)
class MathProblem:
    """question: for a reader. answer: exact, an integer or a fraction such as -7/3."""

    question: str
    answer: str


def make_math_problems(level: str, num_problems: int, seed: int = 0) -> tuple[MathProblem, ...]:
    """Distinct problems of a level; the same for the same arguments, everywhere.

    easy: sums and differences of numbers up to 20. medium: two-step arithmetic with products and brackets.
    hard: linear equations with a rational solution, sums of fractions, remainders of powers.
    """
    if level not in KINDS:
        raise BadInputError(f"difficulty={level!r}: must be one of {', '.join(LEVELS)}.")
    if not isinstance(num_problems, int) or not 1 <= num_problems <= MAX_PROBLEMS:
        raise BadInputError(f"num_problems={num_problems!r}: must be between 1 and {MAX_PROBLEMS}.")
    rng = random.Random(f"{level}/{seed}")
    problems: dict[str, MathProblem] = {}
    while len(problems) < num_problems:
        problem = rng.choice(KINDS[level])(rng)
        problems[problem.question] = problem
    return tuple(problems.values())


def _sum(rng: random.Random) -> MathProblem:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    return MathProblem(f"What is {a} + {b}?", str(a + b))


def _difference(rng: random.Random) -> MathProblem:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    return MathProblem(f"What is {a} - {b}?", str(a - b))


def _product_and_sum(rng: random.Random) -> MathProblem:
    a, b, c = rng.randint(2, 12), rng.randint(2, 12), rng.randint(10, 99)
    return MathProblem(f"What is {a} * {b} + {c}?", str(a * b + c))


def _brackets(rng: random.Random) -> MathProblem:
    a, b, c = rng.randint(10, 99), rng.randint(10, 99), rng.randint(2, 9)
    return MathProblem(f"What is ({a} - {b}) * {c}?", str((a - b) * c))


def _linear_equation(rng: random.Random) -> MathProblem:
    a, b, c = (
        rng.choice([-9, -7, -5, -4, -3, -2, 2, 3, 4, 5, 7, 9]),
        rng.randint(-20, 20),
        rng.randint(-20, 20),
    )
    sign = "-" if b < 0 else "+"
    return MathProblem(f"Solve {a}x {sign} {abs(b)} = {c} for x.", str(Fraction(c - b, a)))


def _fractions(rng: random.Random) -> MathProblem:
    first = Fraction(rng.randint(1, 9), rng.randint(2, 9))
    second = Fraction(rng.randint(1, 9), rng.randint(2, 9))
    return MathProblem(f"What is {first} + {second}, as a fraction?", str(first + second))


def _power_remainder(rng: random.Random) -> MathProblem:
    base, exponent, modulus = rng.randint(2, 9), rng.randint(5, 30), rng.randint(7, 23)
    text = f"What is the remainder when {base}^{exponent} is divided by {modulus}?"
    return MathProblem(text, str(pow(base, exponent, modulus)))


KINDS: dict[str, tuple[Callable[[random.Random], MathProblem], ...]] = {
    "easy": (_sum, _difference),
    "medium": (_product_and_sum, _brackets),
    "hard": (_linear_equation, _fractions, _power_remainder),
}
MAX_PROBLEMS = 600
"""The easy level has 882 different problems; drawing nearly all of them would take long."""
