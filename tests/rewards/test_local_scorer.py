from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from rl_cluster.rewards.local_scorer import LocalScorer
from rl_cluster.trajectory import TrajectoryGroup

MakeGroup = Callable[..., TrajectoryGroup]


def lengths(prompts: Any, responses: list[str], metadata: Any) -> list[float]:
    return [float(len(response)) for response in responses]


async def async_lengths(prompts: Any, responses: list[str], metadata: Any) -> list[float]:
    return lengths(prompts, responses, metadata)


async def test_plain_and_asynchronous_functions_score_a_group(make_group: MakeGroup) -> None:
    group = make_group("1+1=", ["2", "33"])
    for function in (lengths, async_lengths, lambda *rows: async_lengths(*rows)):
        scores = await LocalScorer("length", function, weight=2.0).score(group)
        assert scores.values.tolist() == [1.0, 2.0]


async def test_a_plain_function_does_not_hold_up_the_event_loop(make_group: MakeGroup) -> None:
    begun, released = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def waits(prompts: Any, responses: list[str], metadata: Any) -> list[float]:
        loop.call_soon_threadsafe(begun.set)
        assert released.wait(30), "the event loop stood still meanwhile"
        return [1.0] * len(responses)

    scoring = asyncio.create_task(LocalScorer("waits", waits).score(make_group("1=", ["1"])))
    await begun.wait()
    released.set()
    assert (await scoring).values.tolist() == [1.0]


async def test_a_function_that_hangs_is_a_timeout_and_the_next_group_is_scored(make_group: MakeGroup) -> None:
    never = threading.Event()

    def hangs_on_zero(prompts: Any, responses: list[str], metadata: Any) -> list[float]:
        if responses[0] == "0":
            never.wait(60)
        return [1.0]

    async def sleeps(prompts: Any, responses: Any, metadata: Any) -> list[float]:
        await asyncio.sleep(60)
        return [1.0]

    hanging = LocalScorer("hang", hangs_on_zero, timeout_seconds=0.2)
    failure = await hanging.score(make_group("1=", ["0"]))
    assert (failure.kind, failure.message) == ("timeout", "no answer within 0.2 s")
    assert (
        await LocalScorer("s", sleeps, timeout_seconds=0.05).score(make_group("1=", ["0"]))
    ).kind == "timeout"
    assert (await LocalScorer("hang", hangs_on_zero).score(make_group("1=", ["1"]))).values.tolist() == [1.0]
    never.set()


async def test_whatever_is_raised_is_a_failure_with_its_traceback(make_group: MakeGroup) -> None:
    def raises(error: BaseException) -> Callable[..., list[float]]:
        def function(prompts: Any, responses: Any, metadata: Any) -> list[float]:
            raise error

        return function

    group = make_group("1=", ["1"])
    for error, message in [
        (ValueError("bad"), "ValueError: bad"),
        (TimeoutError("mine"), "TimeoutError: mine"),
        (StopIteration("odd"), "RuntimeError: StopIteration: odd"),
        (SystemExit(3), "RuntimeError: SystemExit: 3"),
    ]:
        failure = await LocalScorer("f", raises(error)).score(group)
        assert (failure.kind, failure.message) == ("raised", message)
    assert "raise error" in (await LocalScorer("f", raises(ValueError("bad"))).score(group)).traceback


async def test_a_wrong_answer_of_the_function_is_a_typed_failure(make_group: MakeGroup) -> None:
    scorer = LocalScorer("f", lambda p, r, m: [float("nan")] * len(r))
    assert (await scorer.score(make_group("1=", ["1"]))).kind == "not_finite"
