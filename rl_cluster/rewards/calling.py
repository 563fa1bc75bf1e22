"""A scorer's function and finished groups in; per group its Scores or a typed ScoreFailure out."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_cluster.rewards.answers import Outcome as Outcome
from rl_cluster.rewards.answers import read_answer as read_answer
from rl_cluster.rewards.loading import ScoreFunction
from rl_cluster.rewards.safe_text import error_text, traceback_text
from rl_cluster.trajectory import ScoreFailure, TrajectoryGroup


@dataclass(frozen=True)
class Arguments:
    """What the function is called with: one entry per sample, groups one after the other, and their sizes."""

    prompts: list[str]
    responses: list[str]
    metadata: list[dict[str, Any]]
    sizes: tuple[int, ...]


def gather_arguments(groups: Sequence[TrajectoryGroup]) -> Arguments:
    samples = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
    return Arguments(
        prompts=[prompt.text for prompt, _ in samples],
        responses=[trajectory.response_text for _, trajectory in samples],
        # A copy each: what the user's function does to one row must not reach another.
        metadata=[dict(prompt.metadata) for prompt, _ in samples],
        sizes=tuple(len(group.trajectories) for group in groups),
    )


def call(function: ScoreFunction, arguments: Arguments) -> Any:
    """The function's raw answer; an awaitable if it is asynchronous."""
    return function(arguments.prompts, arguments.responses, arguments.metadata)


def score_groups(name: str, function: ScoreFunction, groups: Sequence[TrajectoryGroup]) -> list[Outcome]:
    """One outcome per group, in order, from a thread without an event loop; never raises for the function.

    When a call over several groups fails as a whole, each group is tried on its own, to find the culprit.
    """
    return asyncio.run(score_groups_async(name, function, groups))


async def score_groups_async(
    name: str, function: ScoreFunction, groups: Sequence[TrajectoryGroup]
) -> list[Outcome]:
    """As score_groups, inside an event loop (which a synchronous function blocks)."""
    outcomes = await score_arguments(name, function, gather_arguments(groups))
    if len(groups) > 1 and all(isinstance(outcome, ScoreFailure) for outcome in outcomes):
        return [(await score_groups_async(name, function, [group]))[0] for group in groups]
    return outcomes


async def score_arguments(name: str, function: ScoreFunction, arguments: Arguments) -> list[Outcome]:
    """One call, one outcome per group."""
    start = time.perf_counter()
    try:
        answer = await resolve(call(function, arguments))
    except BaseException as error:
        if not is_the_functions_own(error):
            raise
        return [failure_of(name, error) for _ in arguments.sizes]
    seconds = time.perf_counter() - start
    return read_answer(name, answer, arguments.sizes, seconds, none_is_missing=True)


async def resolve(answer: Any) -> Any:
    """The answer itself, awaited if need be."""
    return await _await(answer) if inspect.isawaitable(answer) else answer


async def _await(answer: Awaitable[Any]) -> Any:
    return await answer


def failure_of(name: str, error: BaseException) -> ScoreFailure:
    """A ScoreFailure that carries the function's own traceback."""
    return ScoreFailure(
        name=name,
        kind="raised",
        message=error_text(error),
        traceback=traceback_text(error),
    )


def is_the_functions_own(error: BaseException) -> bool:
    """False for what means that this coroutine itself is to end: a cancellation from outside, or its closing.

    SystemExit and KeyboardInterrupt are the function's: the event loop turns Ctrl-C into a cancellation.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() == 0
    return not isinstance(error, GeneratorExit)
