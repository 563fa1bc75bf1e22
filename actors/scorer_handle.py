"""The Scorer protocol over Ray workers: Refs of groups in, their scores or typed failures out.

Workers are held to a deadline per call. One that misses it is killed and replaced, because a thread that
runs the user's code cannot be stopped in any other way; one that dies is replaced.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from rl_cluster.errors import DeadlineError, RLClusterError, WorkerDiedError
from rl_cluster.protocols import Ref
from rl_cluster.ray_answers import last_words
from rl_cluster.trajectory import ScoreFailure, Scores

Outcome = Scores | ScoreFailure

MakeWorker = Callable[[str], Any]
"""Worker name -> handle of a Ray actor with `start() -> pid` and `score(*groups) -> list[Outcome]`."""


@dataclass(eq=False)
class _Ticket:
    """One group that waits for its score. alone: it must not share a call with others."""

    group: Ref
    future: asyncio.Future[Outcome]
    alone: bool = False


@dataclass(eq=False)
class _Slot:
    """A place for one worker; `ready` ends with the worker's pid when it can be called."""

    name: str
    worker: Any
    ready: asyncio.Task[int]
    load: int = 0
    restarts: int = 0


@dataclass(frozen=True)
class Limits:
    """calls_per_worker: calls in flight at one worker. groups_per_call: waiting groups that share a call.

    timeout_seconds: for one call, from when a worker takes it. start_seconds: for starting a worker.
    """

    timeout_seconds: float
    num_workers: int = 1
    calls_per_worker: int = 1
    groups_per_call: int = 1
    start_seconds: float = 600.0


@dataclass
class RayScorer:
    """Implements protocols.Scorer. Call `start` before the first score and `close` after the last."""

    name: str
    weight: float
    make_worker: MakeWorker
    limits: Limits
    _slots: list[_Slot] = field(default_factory=list)
    _waiting: deque[_Ticket] = field(default_factory=deque)
    _calls: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Start all workers; raises what a worker raises while it loads (BadInputError), DeadlineError."""
        self._slots = [self._open(f"{self.name}/{index}") for index in range(self.limits.num_workers)]
        results = await asyncio.gather(*(slot.ready for slot in self._slots), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.close()
            raise errors[0]

    async def close(self) -> None:
        """End the workers; groups that still wait are cancelled."""
        tasks = [*self._calls, *(slot.ready for slot in self._slots)]
        for task in tasks:
            task.cancel()
        for ticket in self._waiting:
            ticket.future.cancel()
        self._waiting.clear()
        for slot in self._slots:
            ray.kill(slot.worker)
        self._slots = []
        await asyncio.gather(*tasks, return_exceptions=True)

    async def score(self, group: Ref) -> Outcome:
        """One value per trajectory of the group, or a typed failure.

        WorkerDiedError if the group itself is lost (the process that held it died).
        """
        assert self._slots, "start() comes first"
        ticket = _Ticket(group, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        self._dispatch()
        return await ticket.future

    @property
    def pids(self) -> dict[str, int]:
        """Worker name -> process id, of the workers that are up."""
        return {slot.name: slot.ready.result() for slot in self._slots if _is_up(slot)}

    @property
    def num_restarts(self) -> int:
        return sum(slot.restarts for slot in self._slots)

    def _open(self, name: str) -> _Slot:
        worker = self.make_worker(name)
        return _Slot(name, worker, asyncio.create_task(self._wait_until_ready(name, worker)))

    async def _wait_until_ready(self, name: str, worker: Any) -> int:
        try:
            return int(await asyncio.wait_for(worker.start.remote(), self.limits.start_seconds))
        except TimeoutError:
            raise DeadlineError(
                f"scorer worker {name} did not start within {self.limits.start_seconds:g} s; "
                "the cluster may lack the CPUs or GPUs that it asks for"
            ) from None
        except RayActorError as error:
            words = last_words(str(error))
            raise WorkerDiedError(name, f"it died while starting: {error}{words}") from error
        except RayTaskError as error:
            # Ray wraps what the worker raised together with a traceback; the user wants the message.
            raise (error.cause if isinstance(error.cause, RLClusterError) else error) from None

    def _replace(self, slot: _Slot) -> None:
        ray.kill(slot.worker)
        slot.worker = self.make_worker(slot.name)
        slot.ready = asyncio.create_task(self._wait_until_ready(slot.name, slot.worker))
        slot.restarts += 1

    def _dispatch(self) -> None:
        while self._waiting and self._slots:
            slot = min(self._slots, key=lambda s: (s.load, not _is_up(s)))
            if slot.load >= self.limits.calls_per_worker:
                return
            slot.load += 1
            call = asyncio.create_task(self._call(slot, self._next_tickets()))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    def _next_tickets(self) -> list[_Ticket]:
        tickets = [self._waiting.popleft()]
        while (
            self._waiting
            and len(tickets) < self.limits.groups_per_call
            and not (tickets[0].alone or self._waiting[0].alone)
        ):
            tickets.append(self._waiting.popleft())
        return tickets

    async def _call(self, slot: _Slot, tickets: list[_Ticket]) -> None:
        try:
            await self._call_worker(slot, tickets)
        except asyncio.CancelledError:
            for ticket in tickets:
                ticket.future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 — handed to whoever waits for the score
            for ticket in tickets:
                if not ticket.future.done():
                    ticket.future.set_exception(error)
        finally:
            slot.load -= 1
            self._dispatch()

    async def _call_worker(self, slot: _Slot, tickets: list[_Ticket]) -> None:
        worker = None
        while slot.worker is not worker:
            worker = slot.worker
            try:
                # Shielded: one call's end must not end the start that others wait for too.
                await asyncio.shield(slot.ready)
            except RLClusterError as error:
                if slot.worker is worker:
                    self._replace(slot)
                self._fail(tickets, "died", f"worker {slot.name} could not be started: {error}")
                return
        try:
            groups = [ticket.group for ticket in tickets]
            answers = await asyncio.wait_for(worker.score.remote(*groups), self.limits.timeout_seconds)
        except TimeoutError:
            if slot.worker is worker:
                self._replace(slot)
            self._missed_deadline(slot, tickets)
        except RayActorError as error:
            if slot.worker is not worker:
                # Killed because another call hung; these groups are not to blame.
                self._waiting.extendleft(reversed(tickets))
                return
            self._replace(slot)
            self._fail(tickets, "died", f"worker {slot.name} died: {error}{last_words(str(error))}")
        except ObjectLostError as error:
            raise WorkerDiedError(
                "holder of a group", f"the group is lost before it was scored: {error}"
            ) from error
        else:
            for ticket, answer in zip(tickets, answers, strict=True):
                _settle(ticket, answer)

    def _missed_deadline(self, slot: _Slot, tickets: list[_Ticket]) -> None:
        if len(tickets) == 1:
            seconds = self.limits.timeout_seconds
            self._fail(
                tickets, "timeout", f"no answer within {seconds:g} s; worker {slot.name} was restarted"
            )
            return
        for ticket in tickets:
            ticket.alone = True
        self._waiting.extendleft(reversed(tickets))

    def _fail(self, tickets: list[_Ticket], kind: Any, message: str) -> None:
        for ticket in tickets:
            _settle(ticket, ScoreFailure(self.name, kind, message))


def _settle(ticket: _Ticket, outcome: Outcome) -> None:
    if not ticket.future.done():
        ticket.future.set_result(outcome)


def _is_up(slot: _Slot) -> bool:
    return slot.ready.done() and not slot.ready.cancelled() and slot.ready.exception() is None
