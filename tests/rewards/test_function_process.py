"""Functions of recipes without Ray: in a process of their own, tried before the run, told of by name."""

from __future__ import annotations

import asyncio
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_cluster.config.reward import FunctionScorer, RewardConfig
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.before_start import check_functions
from rl_cluster.rewards.local_scorers import make_local_scorers
from rl_cluster.trajectory import Prompt, TrajectoryGroup

MakeGroup = Callable[..., TrajectoryGroup]

SOURCE = """
import asyncio, os, signal, sys, time
from decimal import Decimal
from fractions import Fraction

def lengths(prompts, responses, metadata, factor=1.0):
    return [factor * len(r) for r in responses]

async def together(prompts, responses, metadata):
    await asyncio.sleep(0)
    if responses[0] == "2":
        await asyncio.sleep(3600)
    return [os.getpid() for _ in responses]

class Ends(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")
    __repr__ = __str__

def ends(prompts, responses, metadata):
    word = responses[0]
    if word == "1": os._exit(0)
    if word == "2": os.kill(os.getpid(), signal.SIGKILL)
    if word == "3": sys.exit(0)
    if word == "4": raise KeyboardInterrupt
    if word == "5": raise Mute
    if word == "6": raise Ends("and more")
    if word == "7": time.sleep(3600)
    if word == "8": raise asyncio.CancelledError
    return [Decimal("0.5") if word == "9" else Fraction(1, 4) for _ in responses]

class Judge:
    def __call__(self, prompts, responses, metadata):
        return [None for _ in responses]

judge = Judge()

def one(prompt, response): return 0.0
def positional(prompts, responses, metadata, /, *, needed): return [0.0]
def per_sample(prompts, response, metadata): return 1.0
def trl(completions, **kwargs): return [0.0 for _ in completions]
def column(prompts, responses, metadata): return [float(row["solution"]) for row in metadata]
def two(prompts, responses, metadata): return [0.0, 1.0]
def dislikes_nothing(prompts, responses, metadata): return [1 / len(r) for r in responses]
def types_inside(prompts, responses, metadata): return [1 + r for r in responses]
def leaves(prompts, responses, metadata): os._exit(0)
async def asynchronous(prompts, responses, metadata): return 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scorer_of(function: str, **fields: Any) -> Any:
    config = RewardConfig(scorers=(FunctionScorer(function=f"mine.py:{function}", **fields),))
    (scorer,) = make_local_scorers(config, None)
    return scorer


def test_options_reach_the_function_and_scores_come_back(folder: Path, make_group: MakeGroup) -> None:
    scorer = scorer_of("lengths", options={"factor": 2.0}, weight=0.5)
    scores = asyncio.run(scorer.score(make_group("1+1=", ["2", "33"])))
    assert (scores.name, scorer.weight, scores.values.tolist()) == ("lengths", 0.5, [2.0, 4.0])


async def test_an_asynchronous_function_has_many_calls_at_a_time(folder: Path, make_group: MakeGroup) -> None:
    scorer = scorer_of("together", timeout_seconds=30.0)
    waiting = asyncio.create_task(scorer.score(make_group("1+1=", ["2"])))
    scores = [await scorer.score(make_group("1+1=", ["3"])) for _ in range(3)]
    assert len({float(score.values[0]) for score in scores}) == 1
    assert scores[0].values[0] != os.getpid()
    waiting.cancel()


ENDINGS = [
    ("1", "died", "the function ended its process (exit status 0)"),
    ("2", "died", "the function ended its process (SIGKILL)"),
    ("3", "raised", "SystemExit: 0"),
    ("4", "raised", "KeyboardInterrupt"),
    ("5", "raised", "Mute: <no text: making it raised ValueError>"),
    ("6", "raised", "Ends: and more"),
    ("7", "timeout", "no answer within 2 s"),
    ("8", "raised", "CancelledError"),
]


async def test_however_a_call_ends_it_is_a_failure_by_name_and_the_next_call_is_answered(
    folder: Path, make_group: MakeGroup
) -> None:
    scorer = scorer_of("ends", timeout_seconds=2.0, name="mine")
    for word, kind, message in ENDINGS:
        failure = await scorer.score(make_group("1+1=", [word]))
        assert (failure.name, failure.kind) == ("mine", kind), word
        assert message in failure.message
        # The time of a slow start is not the function's: the call is tried until it is answered.
        while (outcome := await scorer.score(make_group("1+1=", ["9"]))) and hasattr(outcome, "kind"):
            assert outcome.kind == "timeout"
        assert outcome.values.tolist() == [0.5]


def prompt(**metadata: Any) -> Prompt:
    return Prompt("a:1", np.array([1], dtype=np.int32), "1+1=", metadata)


def check(name: str, **options: Any) -> None:
    check_functions([FunctionScorer(function=f"mine.py:{name}", options=options)], [prompt(answer="2")])


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("one", {}, r"rewards.scorers \(one\): mine.py:one takes \(prompt, response\).*too many positional"),
        ("lengths", {"speed": 1}, r"lengths.*unexpected keyword argument 'speed'"),
        ("positional", {}, "missing a required.*'needed'"),
        ("trl", {}, r"takes \(completions, \*\*kwargs\), and would be called as f\(prompts, responses"),
        ("per_sample", {}, "returned float, but a list of 1 numbers is needed"),
        ("asynchronous", {}, "returned int, but a list of 1 numbers is needed"),
        ("column", {}, "it looks for 'solution', and the columns of the data are: answer"),
        ("two", {}, "returned 2 scores for 1 responses"),
        ("leaves", {}, r"leaves: its process ended \(exit status 0\)"),
    ],
)
def test_a_function_that_no_run_could_use_is_refused_before_the_start(
    folder: Path, name: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(BadInputError, match=told):
        check(name, **options)


@pytest.mark.parametrize("name", ["lengths", "judge", "ends"])
def test_a_sound_function_passes_without_a_word(folder: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(name)


@pytest.mark.parametrize(
    ("name", "told"), [("dislikes_nothing", "ZeroDivisionError"), ("types_inside", "TypeError")]
)
def test_what_else_the_trial_raises_is_a_warning(folder: Path, name: str, told: str) -> None:
    with pytest.warns(UserWarning, match=rf"mine.py:{name}, called with .* an empty response, raised {told}"):
        check(name)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("import sys; sys.exit(0)", "importing it failed with SystemExit: 0"),
        ("import os; os._exit(0)", r"its process ended \(exit status 0\) while it was imported"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"its process ended \(SIGKILL\)"),
        ("raise BaseException('odd')", "importing it failed with BaseException: odd"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "failed with E: <no text"),
    ],
)
def test_a_file_that_ends_its_process_while_it_is_imported_is_refused_by_name(
    folder: Path, line: str, told: str
) -> None:
    (folder / "mine.py").write_text(line)
    with pytest.raises(BadInputError, match=told) as caught:
        check("lengths")
    assert "mine.py:lengths" in str(caught.value)


def test_a_process_ends_with_its_scorer(folder: Path) -> None:
    scorer = scorer_of("lengths")
    pid = scorer._process._process.pid
    scorer._process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)
