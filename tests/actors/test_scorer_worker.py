"""Scorers in Ray workers, on one local Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.scorer_handle import RayScorer
from actors.scorer_worker import make_function_scorer
from rl_cluster.config.reward import ExactMatchScorer, FunctionScorer, ScorerConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import TrajectoryGroup

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("ray_session")]
MakeGroup = Callable[..., TrajectoryGroup]

SOURCE = '''
import asyncio, os, time

def act(prompts, responses, metadata):
    """hang, die, raise, or score; a response may ask for it."""
    for response in responses:
        if response == "1":
            time.sleep(3600)
        if response == "2":
            os._exit(7)
        if response == "3":
            raise LookupError("no oracle")
    return [{"score": float(response), "pid": os.getpid(), "calls": len(prompts)} for response in responses]

async def together(prompts, responses, metadata):
    global waiting
    waiting = globals().get("waiting", 0) + 1
    while waiting < 3:
        await asyncio.sleep(0.01)
    return [1.0 for _ in responses]
'''


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(SOURCE)
    return str(path)


@asynccontextmanager
async def running(config: ScorerConfig, name: str = "act") -> AsyncIterator[RayScorer]:
    scorer = make_function_scorer(config, name)
    await scorer.start()
    try:
        yield scorer
    finally:
        await scorer.close()


async def score(scorer: RayScorer, group: TrajectoryGroup) -> Any:
    return await scorer.score(ray.put(group))


async def test_a_worker_that_hangs_or_dies_is_replaced_and_its_group_fails_by_type(
    functions: str, make_group: MakeGroup
) -> None:
    config = FunctionScorer(function=f"{functions}:act", timeout_seconds=2.0, weight=0.5)
    async with running(config) as scorer:
        assert (scorer.name, scorer.weight) == ("act", 0.5)
        scores = await score(scorer, make_group("=", ["7", "8"]))
        assert scores.values.tolist() == [7.0, 8.0]
        first_pid = int(scores.components["pid"][0])
        assert scorer.pids == {"act/0": first_pid}

        raised = await score(scorer, make_group("=", ["3"]))
        assert (raised.kind, raised.message) == ("raised", "LookupError: no oracle")
        assert 'raise LookupError("no oracle")' in raised.traceback

        hung = await score(scorer, make_group("=", ["7", "1"]))
        assert (hung.kind, hung.message) == ("timeout", "no answer within 2 s; worker act/0 was restarted")
        await wait_until_gone(first_pid)

        died = await score(scorer, make_group("=", ["2"]))
        assert died.kind == "died"
        assert died.message.startswith("worker act/0 died")

        again = await score(scorer, make_group("=", ["9"]))
        assert again.values.tolist() == [9.0]
        assert again.components["pid"][0] != first_pid
        assert scorer.num_restarts == 2

        os.kill(int(again.components["pid"][0]), signal.SIGKILL)
        killed = await score(scorer, make_group("=", ["4"]))
        assert killed.kind == "died"
        assert (await score(scorer, make_group("=", ["5"]))).values.tolist() == [5.0]


async def wait_until_gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.05)


async def test_groups_spread_over_workers_share_calls_and_a_hanging_one_is_singled_out(
    functions: str, make_group: MakeGroup
) -> None:
    config = FunctionScorer(
        function=f"{functions}:act", num_workers=2, groups_per_call=4, timeout_seconds=3.0
    )
    async with running(config) as scorer:
        plain = [make_group("=", [str(4 + i)], i) for i in range(6)]
        outcomes = await asyncio.gather(*(score(scorer, group) for group in plain))
        assert [outcome.values.tolist() for outcome in outcomes] == [[4.0 + i] for i in range(6)]
        assert len({outcome.components["pid"][0] for outcome in outcomes}) == 2
        # The first two find a worker each; the four that wait go together.
        assert [outcome.components["calls"][0] for outcome in outcomes] == [1, 1, 4, 4, 4, 4]

        mixed = [make_group("=", [text]) for text in ("4", "5", "6", "1", "7", "8")]
        outcomes = await asyncio.gather(*(score(scorer, group) for group in mixed))
        kinds = [getattr(outcome, "kind", None) for outcome in outcomes]
        assert kinds == [None, None, None, "timeout", None, None]


async def test_calls_of_an_asynchronous_function_run_at_the_same_time(
    functions: str, make_group: MakeGroup
) -> None:
    async with running(FunctionScorer(function=f"{functions}:together")) as scorer:
        groups = [make_group("=", ["1", "2"], i) for i in range(3)]
        outcomes = await asyncio.gather(*(score(scorer, group) for group in groups))
        assert [outcome.values.tolist() for outcome in outcomes] == [[1.0, 1.0]] * 3


async def test_built_in_scorers_run_in_workers_too(make_group: MakeGroup) -> None:
    async with running(ExactMatchScorer(), "exact_match") as scorer:
        outcome = await score(scorer, make_group("1+1=", ["2", "3", " 2"], answer="2"))
        assert outcome.values.tolist() == [1.0, 0.0, 1.0]


def test_a_function_that_cannot_be_had_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    config = FunctionScorer(function=f"{tmp_path}/missing.py:f")
    with pytest.raises(BadInputError, match="there is no file"):
        make_function_scorer(config, "f")


async def test_a_worker_that_cannot_load_the_function_says_so_at_the_start(functions: str) -> None:
    scorer = make_function_scorer(FunctionScorer(function=f"{functions}:act"), "act")
    Path(functions).write_text("1 / 0")
    with pytest.raises(BadInputError, match="failed with ZeroDivisionError: division by zero") as caught:
        await scorer.start()
    assert "Traceback" not in str(caught.value)


async def test_closing_ends_the_worker_processes(functions: str) -> None:
    async with running(FunctionScorer(function=f"{functions}:act")) as scorer:
        (pid,) = scorer.pids.values()
    await wait_until_gone(pid)
