"""An answer or a response in; what math-verify reads in it, and whether two of them are equal, out.

Runs in the limited child (math_child), never in a training process: a few characters such as 9^{999999999}
keep a processor busy for years, holding the GIL. Imports nothing of this project.
"""

import re
from collections.abc import Iterator
from typing import Any

LONGEST_BARE = 200
"""Characters of a response that may, as a whole, be an expression without marks."""

ANY_NUMBER = "1234567.89"
"""What an answer is compared with to see that it can be compared."""

_MARKED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_NAMED = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}")
_WORD = re.compile(r"[^\W\d_]{2,}")
_OPERATOR = re.compile(r"[-+*/^=<>(){}\[\]|]")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|log|ln|exp|pi)(?![A-Za-z])")
_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)")
_MIXED = re.compile(r"-?\d+ +\d+/\d+")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}")
_BIG = re.compile(r"(?=.*[\^!]|.*\*\*|.*\\(?:binom|sum|prod|int)).*\d{3}", re.DOTALL)
_SAID = re.compile(r"answer(?: is)?:? *([^\n]*?)\.?\s*$", re.IGNORECASE)
_NO_ANSWER = frozenset({"n/a", "n.a.", "na", "none", "null", "nil", "nan", "yes", "no", "true", "false"})


def parse(text: str) -> list[Any]:
    """What math-verify finds, most trusted first; [] for nothing. Its own time limits are off: ours hold."""
    import math_verify

    found: list[Any] = math_verify.parse(text, parsing_timeout=0)
    return found


def equal(gold: list[Any], parsed: list[Any]) -> bool:
    import math_verify

    return bool(math_verify.verify(gold, parsed, timeout_seconds=0))


def is_bare_expression(text: str) -> bool:
    """Mathematics without $ or boxed around it: \\frac{1}{2}, x^2 + 1, (2, 3), C; no words, no sentence."""
    if not text or _MARKED.search(text) or "\n" in text:
        return False
    rest = _COMMAND.sub(" ", _NAMED.sub(" ", in_latex(text)))
    one_letter = len(text) == 1 and text.isalpha()
    marked = _COMMAND.search(text) or _OPERATOR.search(text) or one_letter
    return bool(marked) and not _WORD.search(rest)


def _is_number(text: str) -> bool:
    """Digits and signs around them, such as \\$18.90."""
    return not _WORD.search(text) and any(character.isdigit() for character in text)


def in_latex(text: str) -> str:
    """sin(x) and sqrt(2) as LaTeX has them; without that, sin is the product of s, i and n."""
    return _FUNCTION.sub(r"\\\1", _ROOT.sub(r"\\sqrt{\1}", text))


def read_bare(text: str) -> list[Any]:
    return parse(f"${in_latex(text)}$")


def read_reference(answer: str) -> tuple[list[Any], str]:
    """(what is parsed, why it is of no use or ""). The right answer of a data row, checked against itself."""
    text = answer.strip()
    if not text or text.lower() in _NO_ANSWER:
        return [], "is no answer in mathematics"
    if _MIXED.fullmatch(text):
        return [], "is a mixed number, which would be read as two: write 1\\frac{1}{2} or 3/2"
    if _DATE.fullmatch(text):
        return [], "is a date, which would be read as a calculation"
    in_text = parse(text)
    in_math = read_bare(text) if is_bare_expression(text) or (not in_text and _is_number(text)) else []
    gold = in_math or in_text
    if not any(is_value(part) for part in gold):
        return [], "cannot be read as mathematics"
    if not equal(gold, gold):
        return [], "is read as something that is not equal to itself"
    if _BIG.search(text):
        # Comparing with another number evaluates it: one that takes for ever ends this process here.
        equal(gold, parse(ANY_NUMBER))
    if not in_math and not _MARKED.search(text) and not _WORD.search(text):
        other = read_bare(text)
        if other and not equal(gold, other):
            return [], f"is {other[0]} as mathematics and {gold[0]} in a text: put $ around what is meant"
    return gold, ""


def is_value(part: Any) -> bool:
    """A number, expression or set; not text, and not what a division by zero gives."""
    import sympy

    return not isinstance(part, str) and part not in (sympy.nan, sympy.zoo)


def is_right(gold: list[Any], response: str) -> bool:
    """Whether a response gives the answer that read_reference has read."""
    return any(parsed and equal(gold, parsed) for parsed in _readings(response))


def _readings(response: str) -> Iterator[list[Any]]:
    """What math-verify finds by itself, then with functions as LaTeX names them, then without any marks."""
    found = parse(response)
    yield found
    if in_latex(response) != response:
        yield parse(in_latex(response))
    text = response.strip()
    said = _SAID.search(text[-LONGEST_BARE:])
    for part in (text, said.group(1) if said else ""):
        bare = is_bare_expression(part) or (not found and _is_number(part))
        if len(part) <= LONGEST_BARE and bare:
            yield read_bare(part)
