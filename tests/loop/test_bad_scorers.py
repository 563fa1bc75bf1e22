"""Reward functions that misbehave in a whole run on fakes: typed, counted, never 0, and then the end."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_cluster.errors import CheckpointError, ScorerError
from rl_cluster.loop.state import LoopState
from rl_cluster.rewards.local_scorer import LocalScorer
from tests.fakes import FakeLearner
from tests.loop.test_loop import Rig, make_config

GO_ON = threading.Event()
"""Lets the threads of the sleeping function end with the test."""


def count_ones(responses: Sequence[str]) -> list[float]:
    return [float(text.count("1")) for text in responses]


def sleeps_for_ever(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float]:
    GO_ON.wait(60)
    return [0.0] * len(responses)


async def awaits_for_ever(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float]:
    await asyncio.Event().wait()
    return []


def returns_nan(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float]:
    return [math.nan, *count_ones(responses)[1:]]


def returns_one_too_few(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float]:
    return count_ones(responses)[1:]


def raises(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float]:
    raise ZeroDivisionError("a reward by division")


CASES = [
    (sleeps_for_ever, 0.1, "timeout: no answer within 0.1 s"),
    (awaits_for_ever, 0.1, "timeout: no answer within 0.1 s"),
    (returns_nan, 60.0, "not_finite: returned nan for sample 0"),
    (returns_one_too_few, 60.0, "wrong_length: returned 7 scores for 8 responses"),
    (raises, 60.0, "ZeroDivisionError: a reward by division"),
]


@pytest.mark.parametrize(("function", "seconds", "told"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_scorer_that_always_misbehaves_ends_the_run_with_its_name_and_cause(
    tmp_path: Path, function: Callable[..., Any], seconds: float, told: str
) -> None:
    scorer = LocalScorer("ones", function, timeout_seconds=seconds)
    config = make_config(run={"steps": 50}, rewards={"max_retries": 0, "max_failure_fraction": 0.02})
    rig = Rig(config, tmp_path, scorer=scorer)
    rig.loop._evaluator = None
    try:
        with pytest.raises(ScorerError, match="scorer 'ones' failed for 2 of the last 2 groups") as caught:
            rig.run()
    finally:
        GO_ON.set()
        GO_ON.clear()
    assert told in str(caught.value)
    assert rig.learner.trained_groups == [], "no group was scored, so nothing was trained"


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (awaits_for_ever, "timeout"),
        (returns_nan, "not_finite"),
        (returns_one_too_few, "wrong_length"),
        (raises, "raised"),
    ],
)
def test_a_group_that_a_scorer_spoils_is_dropped_and_counted_and_the_run_goes_on(
    tmp_path: Path, function: Callable[..., Any], kind: str
) -> None:
    """The groups of one prompt of seven, so that it happens several times among 24 groups."""

    async def spoils_one(prompts: Sequence[str], responses: Sequence[str], metadata: Any) -> list[float]:
        if prompts[0] != "prompt 2":
            return count_ones(responses)
        answer = function(prompts, responses, metadata)
        return await answer if asyncio.iscoroutine(answer) else answer

    scorer = LocalScorer("ones", spoils_one, timeout_seconds=0.5 if kind == "timeout" else 60.0)
    rewards = {"max_retries": 0, "max_failure_fraction": 0.5}
    rig = Rig(make_config(rewards=rewards), tmp_path, scorer=scorer)
    rig.loop._evaluator = None
    rig.run()
    dropped = rig.loop.ledger.counts()["dropped"]
    assert dropped >= 3
    assert len(rig.learner.trained_groups) == 24
    failures = {name: n for name, n in rig.observer.rows[6].items() if name.startswith("failures/")}
    assert failures == {f"failures/ones/{kind}": dropped}


def test_a_full_disk_at_a_checkpoint_ends_the_run_and_leaves_the_one_before(tmp_path: Path) -> None:
    class LearnerOnAFullDisk(FakeLearner):
        """Its disk fills up in the middle of the second checkpoint."""

        async def save(self, folder: Path) -> None:
            await super().save(folder)
            if self._step > 3:
                (folder / "half").write_text("half of a state")
                with open("/dev/full", "w") as file:
                    file.write("the rest")

    rig = Rig(make_config(checkpoint={"every": 3}), tmp_path, learner=LearnerOnAFullDisk())
    with pytest.raises(CheckpointError, match=r"step-6 could not be written: .*No space left.*Free space"):
        rig.run()
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-3"]
    assert LoopState.read(folder / "step-3").step == 3
