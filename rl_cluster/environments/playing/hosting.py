"""Environments for an event loop: a factory in; checked facts of each start and step out, never blocking it.

Every environment lives in one thread of its own (a daemon: a hanging environment is left behind, with its
thread). What it raises, its missing a deadline, and a reward that is not finite are EpisodeErrors; an answer
that breaks the contract of environments is a BadInputError, because no second attempt could help.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.environments.playing.starting import UnknownPromptError, start_environment
from rl_cluster.errors import BadInputError, EpisodeError
from rl_cluster.rewards.answers import LARGEST_SCORE
from rl_cluster.rewards.safe_text import error_text, repr_text, traceback_text
from rl_cluster.trajectory import FinishReason, Prompt

Factory = Callable[[Any], Any]
"""f(tokenizer) -> an environment: reset() and step(action), as RLEnvironment."""


@dataclass(frozen=True)
class StepFacts:
    """What a step brought. shown: all tokens of the next observation; None where there is none.

    taken: how many of the step's tokens belong to the episode. finish_reason: as the environment names it.
    """

    reward: float
    done: bool
    shown: list[int] | None
    taken: int
    finish_reason: FinishReason
    metrics: Mapping[str, float] = field(default_factory=dict)


class HostedEnvironment:
    """One environment in its thread. Call `open` first; one episode at a time."""

    def __init__(
        self, factory: Factory, tokenizer: Any, timeout_seconds: float, end_token_ids: frozenset[int]
    ) -> None:
        self._factory, self._tokenizer = factory, tokenizer
        self._end_token_ids = end_token_ids
        self._timeout_seconds = timeout_seconds
        self._environment: Any = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.wants_tokens = False
        threading.Thread(target=_serve, args=(self._calls,), name="environment", daemon=True).start()

    async def open(self) -> None:
        """Make the environment, in the thread that all its calls are made from."""
        made = await self._call("making the environment", lambda: self._factory(self._tokenizer))
        for name in ("reset", "step"):
            if not callable(getattr(made, name, None)):
                raise BadInputError(
                    f"rollout.environment: the factory returned {type(made).__name__} without {name}(). "
                    "Return an environment as rl_cluster.environments.RLEnvironment."
                )
        take = getattr(made, "take_end_tokens", None)
        if take is not None:
            await self._call("take_end_tokens", lambda: take(self._end_token_ids))
        self._environment = made
        self.wants_tokens = bool(getattr(made, "wants_tokens", False))

    async def start(self, prompt: Prompt, seed: int) -> list[int]:
        """The tokens of the first observation."""
        start = lambda: start_environment(self._environment, prompt, seed)  # noqa: E731
        return observed_tokens(await self._call("the start of the episode", start))

    async def step(self, tokens: list[int]) -> StepFacts:
        action = torch.tensor(tokens, dtype=torch.int64)
        return read_step(await self._call("step", lambda: self._environment.step(action)), len(tokens))

    async def truncate(self) -> StepFacts | None:
        """Tell the environment, where it has a `truncate`, that the run ends the episode here."""
        truncate = getattr(self._environment, "truncate", None)
        if truncate is None:
            return None
        result = await self._call("truncate", truncate)
        return None if result is None else read_step(result, 0)

    def close(self) -> None:
        """End the thread, after what it is doing now and the environment's own close(), if it has one."""
        self._calls.put(getattr(self._environment, "close", None))
        self._calls.put(None)

    async def _call(self, doing: str, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        deadline = asyncio.timeout(self._timeout_seconds)
        self._calls.put(lambda: _settle(loop, future, function))
        try:
            async with deadline:
                return await future
        except UnknownPromptError:
            raise
        except Exception as error:  # whatever the environment raises: its user gets to see it
            if deadline.expired():
                message = (
                    f"{doing} took longer than rollout.environment.timeout_seconds={self._timeout_seconds:g}"
                )
                raise EpisodeError("timeout", message, "") from error
            message = f"{doing}: {error_text(error)}"
            raise EpisodeError("raised", message, traceback_text(error)) from None


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()


def _settle(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], function: Callable[[], Any]
) -> None:
    """In the environment's thread: call, and hand value or error to the event loop."""
    try:
        value = function()
        outcome: tuple[Any, Exception | None] = (value, None)
    except BaseException as error:  # noqa: BLE001 — whatever it is, the caller must hear of it
        # A future refuses StopIteration, and SystemExit would end the event loop.
        kept = isinstance(error, Exception) and not isinstance(error, StopIteration)
        outcome = (None, error if kept else RuntimeError(error_text(error)))  # type: ignore[assignment]
    if not loop.is_closed():
        loop.call_soon_threadsafe(_resolve, future, *outcome)


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():  # given up meanwhile
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def observed_tokens(observation: Any) -> list[int]:
    """The input_ids of an observation ([1, T] or [T], tensor or list) as a list."""
    ids = getattr(observation, "input_ids", None)
    if ids is None:
        raise BadInputError(
            f"rollout.environment: an observation is {type(observation).__name__}, which has no input_ids. "
            "Return an Observation(input_ids, attention_mask, prompt)."
        )
    flat = torch.as_tensor(ids).reshape(-1)
    if flat.is_floating_point() or not len(flat):
        raise BadInputError(
            "rollout.environment: input_ids of an observation must be token ids, at least one."
        )
    return [int(token) for token in flat.tolist()]


def read_step(result: Any, num_tokens: int) -> StepFacts:
    """A StepResult as facts. EpisodeError for a reward or metric that is no finite number."""
    missing = [name for name in ("reward", "done") if not hasattr(result, name)]
    if missing:
        raise BadInputError(
            f"rollout.environment: step returned {type(result).__name__} without {missing[0]}. "
            "Return a StepResult."
        )
    done, info = bool(result.done), dict(getattr(result, "info", None) or {})
    shown = getattr(result, "next_observation", None)
    if not done and num_tokens and shown is None:
        raise BadInputError("rollout.environment: step gave no next_observation, though it is not done.")
    taken = int(info.get("tokens_taken", num_tokens)) if done else num_tokens
    return StepFacts(
        reward=_finite("reward", result.reward),
        done=done,
        shown=None if shown is None or done else observed_tokens(shown),
        taken=min(max(taken, 1), num_tokens),
        finish_reason="length" if info.get("finish_reason") == "length" else "stop",
        metrics=_metrics(getattr(result, "metrics", None) or {}),
    )


def _metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """rewards/environment/NAME: a component called reward_NAME is shown as NAME."""
    return {name.removeprefix("reward_"): _finite(name, value) for name, value in metrics.items()}


def _finite(what: str, value: Any) -> float:
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 — an object of the user's own may raise anything
        number = math.nan
    if not abs(number) <= LARGEST_SCORE:
        message = f"{what} is {repr_text(value, 60)}, not a finite number of float32"
        raise EpisodeError("not_finite", message, "")
    return number


class EnvironmentPool:
    """Makes environments as episodes need them and uses them again; one that failed is not used again.

    settings: limits of episodes, which the player reads. end_token_ids: of the model that plays.
    """

    def __init__(
        self,
        factory: Factory,
        tokenizer: Any,
        settings: EnvironmentConfig,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.settings = settings
        self._factory, self._tokenizer, self._end_token_ids = factory, tokenizer, end_token_ids
        self._idle: list[HostedEnvironment] = []

    async def prepare(self) -> None:
        """Make the first one now, so that what is wrong with it is said before training: BadInputError."""
        try:
            async with self.borrow():
                pass
        except EpisodeError as error:
            _, message, trace = error.args
            raise BadInputError(f"rollout.environment: {message}\n{trace}".rstrip()) from error

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[HostedEnvironment]:
        """An environment for one episode, nobody else's meanwhile."""
        hosted = self._idle.pop() if self._idle else await self._make()
        try:
            yield hosted
        except BaseException:
            # It may be in the middle of anything, even still inside the call that was given up.
            hosted.close()
            raise
        self._idle.append(hosted)

    async def _make(self) -> HostedEnvironment:
        seconds = self.settings.timeout_seconds
        hosted = HostedEnvironment(self._factory, self._tokenizer, seconds, self._end_token_ids)
        try:
            await hosted.open()
        except BaseException:
            hosted.close()
            raise
        return hosted

    def close(self) -> None:
        """End the idle ones."""
        _close_all(self._idle)
        self._idle = []


def _close_all(hosted: Iterable[HostedEnvironment]) -> None:
    for one in hosted:
        one.close()
