"""How the driver talks to a rank, wherever it lives: RankHandle, and its form for a rank in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rl_cluster.errors import DeadlineError, WorkerDiedError
from rl_cluster.protocols import Ref

if TYPE_CHECKING:
    from learners.rank import LearnerRank

GRACE_SECONDS = 5.0
"""After a failure, so long for another rank to turn out to have died, which is then the cause."""


@dataclass(frozen=True)
class Call:
    """name: of the worker. answer: the first thing that the method returns, awaited as a value.
    refs: the others, as Refs."""

    name: str
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
        except Exception as error:  # noqa: BLE001 - it is handed to whoever awaits the answer
            answer.set_exception(error)
            return Call(self.name, answer, (None,) * (returns - 1))
        values = (result,) if returns == 1 else tuple(result)
        answer.set_result(values[0])
        return Call(self.name, answer, values[1:])

    def put(self, value: Any) -> Ref:
        return value

    def close(self) -> None:
        """Nothing runs."""


async def answers(calls: Sequence[Call], what: str, deadline_seconds: float) -> list[Any]:
    """Wait for all calls. The first failure is raised without waiting for the others; when a worker died,
    its death is raised rather than what the other ranks said of it.

    Raises DeadlineError that names the workers whose answers are missing.
    """
    tasks = {asyncio.ensure_future(call.answer): call.name for call in calls}
    done, pending = await asyncio.wait(tasks, timeout=deadline_seconds, return_when=asyncio.FIRST_EXCEPTION)
    if pending and _errors(tasks, done):
        late, pending = await asyncio.wait(
            pending, timeout=GRACE_SECONDS, return_when=asyncio.FIRST_EXCEPTION
        )
        done |= late
    for task in pending:
        task.cancel()
    errors = _errors(tasks, done)
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, WorkerDiedError))
    if pending:
        missing = ", ".join(sorted({tasks[task] for task in pending}))
        raise DeadlineError(f"{what}: no answer from {missing} within {deadline_seconds:g} s")
    return [task.result() for task in tasks]


def _errors(
    tasks: Iterable[asyncio.Future[Any]], done: Collection[asyncio.Future[Any]]
) -> list[BaseException]:
    """In the order of the calls: what fails first is the cause of what needed its answer."""
    return [error for task in tasks if task in done and (error := task.exception()) is not None]
