"""How the driver talks to a rank, wherever it lives: RankHandle, and its form for a rank in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from learners.rank import LearnerRank
from rl_cluster.errors import DeadlineError
from rl_cluster.protocols import Ref


@dataclass(frozen=True)
class Call:
    """answer: the first thing that the method returns, awaited as a value. refs: the others, as Refs."""

    answer: Awaitable[Any]
    refs: tuple[Ref, ...]


class RankHandle(Protocol):
    name: str

    def submit(self, method: str, *args: Any, returns: int = 1) -> Call:
        """Start LearnerRank.method(*args), after all earlier submissions. Refs among args are resolved.

        returns above 1: the method returns a tuple of that many."""
        ...

    def put(self, value: Any) -> Ref:
        """A Ref of a value that several ranks will read."""
        ...

    def close(self) -> None:
        """End the worker; without effect when it has ended."""
        ...


class LocalRank:
    """A rank in this process: calls run at once, and Refs are the objects themselves."""

    def __init__(self, rank: LearnerRank, name: str = "learner-0") -> None:
        self.name = name
        self._rank = rank

    def submit(self, method: str, *args: Any, returns: int = 1) -> Call:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            result = getattr(self._rank, method)(*args)
        except Exception as error:  # noqa: BLE001: it is handed to whoever awaits the answer
            answer.set_exception(error)
            return Call(answer, (None,) * (returns - 1))
        values = (result,) if returns == 1 else tuple(result)
        answer.set_result(values[0])
        return Call(answer, values[1:])

    def put(self, value: Any) -> Ref:
        return value

    def close(self) -> None:
        """Nothing runs."""


async def answers(
    calls: Sequence[tuple[str, Awaitable[Any]]], what: str, deadline_seconds: float
) -> list[Any]:
    """Wait for (worker name, answer) pairs; the first failure is raised at once, without the other answers.

    Raises DeadlineError that names the workers whose answers are missing.
    """
    tasks = {asyncio.ensure_future(awaitable): name for name, awaitable in calls}
    done, pending = await asyncio.wait(tasks, timeout=deadline_seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()
    if pending:
        missing = ", ".join(sorted(tasks[task] for task in pending))
        raise DeadlineError(f"{what}: no answer from {missing} within {deadline_seconds:g} s")
    return [task.result() for task in tasks]
