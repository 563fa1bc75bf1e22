"""A user's scorer function and a real prompt in; BadInputError where no run could use it, or a warning, out.

Bound to its arguments by its signature, then called once with that prompt and an empty response. The call
refuses what shows it to be the wrong one: arguments that it does not take, a column that the data lack, an
answer that is no list of one score. Whatever else it raises, or its taking long, is a warning: a function may
well dislike an empty response, or be in want of a service that is not up yet.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Mapping
from typing import Any

from rl_cluster.config.reward import FunctionScorer
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.answers import read_answer
from rl_cluster.rewards.calling import is_the_functions_own, resolve
from rl_cluster.rewards.safe_text import error_text, traceback_text
from rl_cluster.trajectory import ScoreFailure

TRIAL_SECONDS = 20.0
TRIAL = "called with one prompt and an empty response"


def try_function(
    name: str,
    config: FunctionScorer,
    function: Callable[..., Any],
    prompt: str,
    metadata: Mapping[str, Any],
) -> str:
    """What to warn of, "" if nothing. BadInputError names the scorer."""
    where = f"rewards.scorers ({name}): {config.function}"
    check_binds(where, function, 3, "f(prompts, responses, metadata, **options)")
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, TRIAL_SECONDS)
    try:
        return asyncio.run(_call(where, name, function, prompt, metadata))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"no answer within {TRIAL_SECONDS:g} s")


def check_binds(where: str, function: Callable[..., Any], positions: int, form: str) -> None:
    """BadInputError where the signature cannot take so many arguments (and the options bound to it)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions have none to read
    try:
        signature.bind(*[None] * positions)
    except TypeError as error:
        raise BadInputError(
            f"{where} takes {signature}, and would be called as {form}: {error}. Correct the function, or "
            "the options."
        ) from error


async def _call(
    where: str, name: str, function: Callable[..., Any], prompt: str, metadata: Mapping[str, Any]
) -> str:
    try:
        answer = await resolve(function([prompt], [""], [dict(metadata)]))
    except BaseException as error:
        if not is_the_functions_own(error):
            raise
        if refusal := refusal_of(error, metadata):
            raise BadInputError(f"{where}, {TRIAL}: {refusal}") from error
        return (
            f"{where}, {TRIAL}, raised {error_text(error)}. The run goes on; if real responses raise it too, "
            f"their groups are dropped.\n{traceback_text(error)}"
        )
    (outcome,) = read_answer(name, answer, (1,), 0.0, none_is_missing=True)
    if isinstance(outcome, ScoreFailure) and outcome.kind != "not_finite":
        raise BadInputError(
            f"{where}, {TRIAL}, {outcome.message}. Return a list with a number (or None, or a dict of "
            "numbers) per response."
        )
    return ""


def refusal_of(error: BaseException, metadata: Mapping[str, Any]) -> str:
    """What is to be corrected, if the error can be nothing else: a column that is not there, arguments."""
    wanted = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(wanted, str) and wanted not in metadata:
        columns = ", ".join(metadata) or "none"
        return f"it looks for {wanted!r}, and the columns of the data are: {columns}."
    own_frames = 0 if error.__traceback__ is None else len(inspect.getinnerframes(error.__traceback__)) - 1
    if isinstance(error, TypeError) and own_frames == 0:
        return f"{error_text(error)}."
    return ""
