"""A scorer's function and finished groups in; per group its Scores or a typed ScoreFailure out.

A row's answer may be a number or a dict of named numbers. The values of a dict are kept as components;
its score is the entry called "score" if there is one, else the sum of all entries.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import numpy as np

from rl_cluster.rewards.loading import ScoreFunction
from rl_cluster.trajectory import ScoreFailure, Scores, TrajectoryGroup

Outcome = Scores | ScoreFailure


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
    arguments = gather_arguments(groups)
    start = time.perf_counter()
    try:
        answer = await resolve(call(function, arguments))
    except Exception as error:  # noqa: BLE001 — the user's code may raise anything
        outcomes: list[Outcome] = [failure_of(name, error) for _ in groups]
    else:
        outcomes = read_answer(name, answer, arguments.sizes, time.perf_counter() - start)
    if len(groups) > 1 and all(isinstance(outcome, ScoreFailure) for outcome in outcomes):
        return [(await score_groups_async(name, function, [group]))[0] for group in groups]
    return outcomes


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
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


def read_answer(name: str, answer: Any, sizes: Sequence[int], seconds: float) -> list[Outcome]:
    """Check and split a function's answer for groups of these sizes.

    A wrong type or length spoils every group; a NaN or infinity only the group that it is in.
    seconds: wall time of the call, shared out among the groups.
    """
    total = sum(sizes)
    if isinstance(answer, str | bytes | Mapping) or not hasattr(answer, "__len__"):
        message = f"returned {type(answer).__name__}, but a list of {total} numbers is needed"
        return [ScoreFailure(name, "raised", message) for _ in sizes]
    if len(answer) != total:
        message = f"returned {len(answer)} scores for {total} responses"
        return [ScoreFailure(name, "wrong_length", message) for _ in sizes]
    rows = list(answer)
    ends = np.cumsum(sizes)
    return [
        _read_group(name, rows[end - size : end], seconds / len(sizes))
        for end, size in zip(ends, sizes, strict=True)
    ]


def _read_group(name: str, rows: list[Any], seconds: float) -> Outcome:
    if all(isinstance(row, Mapping) for row in rows):
        return _read_dicts(name, rows, seconds)
    try:
        values = _floats(rows)
    except (TypeError, OverflowError) as error:
        return ScoreFailure(name, "raised", f"returned what is no score: {error}")
    return _finite(Scores(name, values, seconds=seconds))


def _read_dicts(name: str, rows: list[Mapping[str, Any]], seconds: float) -> Outcome:
    keys = list(rows[0])
    for number, row in enumerate(rows):
        if set(row) != set(keys) or not keys:
            message = f"returned components {sorted(row)} for sample {number}, {sorted(keys)} for sample 0"
            return ScoreFailure(name, "raised", message if keys else "returned an empty dict")
    try:
        components = {str(key): _floats([row[key] for row in rows]) for key in keys}
    except (TypeError, OverflowError) as error:
        return ScoreFailure(name, "raised", f"returned what is no score: {error}")
    values = components["score"] if "score" in components else np.sum(list(components.values()), axis=0)
    return _finite(Scores(name, values, components, seconds))


def _floats(rows: Sequence[Any]) -> np.ndarray:
    """float64 [n]; TypeError for anything that is not a single number (text that looks like one included)."""
    for number, row in enumerate(rows):
        single = isinstance(row, SupportsFloat) and np.asarray(row).ndim == 0
        if not single:
            raise TypeError(f"{type(row).__name__} {row!r:.40} for sample {number}, not a number")
    return np.array([float(row) for row in rows], dtype=np.float64)


def _finite(scores: Scores) -> Outcome:
    for values in (scores.values, *scores.components.values()):
        if not np.isfinite(values).all():
            where = int(np.flatnonzero(~np.isfinite(values))[0])
            message = f"returned {values[where]} for sample {where}"
            return ScoreFailure(scores.name, "not_finite", message)
    return scores
