"""The built-in programming problems: what to write, and calls with the values that they must return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CodeTest:
    """call: a Python expression, for example "add(2, 3)". expected: its value, of built-in types."""

    call: str
    expected: Any


@dataclass(frozen=True)
class CodeProblem:
    prompt: str
    tests: tuple[CodeTest, ...]


def _problem(task: str, expected: Mapping[str, Any]) -> CodeProblem:
    tests = tuple(CodeTest(call, value) for call, value in expected.items())
    return CodeProblem(f"Write a Python function {task}\nAnswer with the code only.\n", tests)


EASY = (
    _problem(
        "`factorial(n)` that returns n! for an integer n >= 0.",
        {"factorial(0)": 1, "factorial(1)": 1, "factorial(5)": 120, "factorial(20)": 2432902008176640000},
    ),
    _problem(
        "`is_even(n)` that returns True if the integer n is even, else False.",
        {"is_even(0)": True, "is_even(7)": False, "is_even(-4)": True, "is_even(-3)": False},
    ),
    _problem(
        "`reverse_words(text)` that returns the words of text in reverse order, separated by single spaces.",
        {
            "reverse_words('one two three')": "three two one",
            "reverse_words('  a   b ')": "b a",
            "reverse_words('')": "",
        },
    ),
    _problem(
        "`count_vowels(text)` that counts the letters a, e, i, o and u, in upper or lower case.",
        {"count_vowels('Education')": 5, "count_vowels('xyz')": 0, "count_vowels('AEIOUaeiou')": 10},
    ),
)

MEDIUM = (
    _problem(
        "`is_prime(n)` that returns True if the integer n is a prime number, else False.",
        {"is_prime(2)": True, "is_prime(1)": False, "is_prime(91)": False, "is_prime(7919)": True},
    ),
    _problem(
        "`flatten(items)` that flattens a list of arbitrarily nested lists into one list.",
        {"flatten([1, [2, [3, []], 4]])": [1, 2, 3, 4], "flatten([])": [], "flatten([[[5]]])": [5]},
    ),
    _problem(
        "`run_lengths(text)` that returns a list of (character, length) tuples, one for each run of equal "
        "characters.",
        {"run_lengths('aaabcc')": [("a", 3), ("b", 1), ("c", 2)], "run_lengths('')": []},
    ),
    _problem(
        "`gcd(a, b)` that returns the greatest common divisor of two positive integers, without imports.",
        {"gcd(12, 18)": 6, "gcd(7, 13)": 1, "gcd(100, 75)": 25, "gcd(270, 192)": 6},
    ),
)

HARD = (
    _problem(
        "`edit_distance(a, b)` that returns the Levenshtein distance of two strings.",
        {
            "edit_distance('kitten', 'sitting')": 3,
            "edit_distance('', 'abc')": 3,
            "edit_distance('flaw', 'lawn')": 2,
            "edit_distance('intention', 'execution')": 5,
        },
    ),
    _problem(
        "`longest_increasing(values)` that returns the length of the longest strictly increasing subsequence "
        "of a list of integers.",
        {
            "longest_increasing([10, 9, 2, 5, 3, 7, 101, 18])": 4,
            "longest_increasing([7, 7, 7])": 1,
            "longest_increasing([])": 0,
            "longest_increasing(list(range(300)))": 300,
        },
    ),
    _problem(
        "`evaluate(expression)` that returns the value of a string with integers, +, -, * and brackets, "
        "without using eval or exec.",
        {"evaluate('2 + 3 * 4')": 14, "evaluate('(2 + 3) * -4')": -20, "evaluate('10 - 2 - 3')": 5},
    ),
    _problem(
        "`topological_order(edges)` that returns the nodes of a directed graph, given as a list of (before, "
        "after) pairs, as a sorted-first topological order (the smallest available node next), or None if "
        "there is a cycle.",
        {
            "topological_order([(1, 2), (2, 3), (1, 3)])": [1, 2, 3],
            "topological_order([(3, 1), (2, 1)])": [2, 3, 1],
            "topological_order([(1, 2), (2, 1)])": None,
        },
    ),
)

PROBLEMS: dict[str, tuple[CodeProblem, ...]] = {"easy": EASY, "medium": MEDIUM, "hard": HARD}
