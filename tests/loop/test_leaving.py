"""How runs end other than well: skipped updates, failures, signals; and which checkpoint is there then."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_cluster.config.run import CheckpointConfig
from rl_cluster.errors import NonFiniteError
from rl_cluster.loop.checkpoints import checkpoint_steps, choose_checkpoint
from rl_cluster.loop.saving import Saving
from rl_cluster.loop.skipped import SkippedUpdates
from rl_cluster.loop.state import LoopState
from rl_cluster.loop.stopping import StopAskedError, StopRequest, stop_signals
from rl_cluster.protocols import OptimParams, OptimResult
from tests.fakes import CountingScorer, FakeLearner, FakeRolloutWorker, RecordingObserver
from tests.loop.test_checkpoints import STATE
from tests.loop.test_fit_loop import TableLearner, fit_config
from tests.loop.test_fit_loop import run as run_fit
from tests.loop.test_loop import Rig, make_config

EVERY = {"every": 1, "keep_last": 2, "keep_best": False}


class Skipping(FakeLearner):
    """Skips the updates of some steps, and nothing else."""

    def __init__(self, steps: set[int], loss: float = math.nan) -> None:
        super().__init__()
        self._skips, self._loss, self._updates = steps, loss, 0

    async def forward_backward(self, *args: Any) -> tuple[dict[str, float], Any]:
        sums, logprobs = await super().forward_backward(*args)
        return {**sums, "policy_loss_sum": self._loss if self._updates + 1 in self._skips else 0.0}, logprobs

    async def optim_step(self, params: OptimParams | None = None) -> OptimResult:
        before, self._updates = self.weight, self._updates + 1
        result = await super().optim_step(params)
        if self._updates not in self._skips:
            return result
        self.weight = before
        return OptimResult(result.step, 1e30, math.nan, skipped=True)


class SkippingTable(TableLearner):
    def __init__(self, steps: set[int]) -> None:
        super().__init__()
        self._skips, self._updates = steps, 0

    async def optim_step(self, params: OptimParams | None = None) -> OptimResult:
        self._updates += 1
        result = await super().optim_step(params)
        return OptimResult(1, 1e-3, math.inf, True) if self._updates in self._skips else result


def steps_in(folder: Path) -> list[int]:
    return checkpoint_steps(folder / "checkpoints")


def test_skipped_updates_in_a_row_end_the_run_and_good_checkpoints_stay(tmp_path: Path) -> None:
    rig = Rig(
        make_config(run={"steps": 20}, checkpoint=EVERY), tmp_path, learner=Skipping({4, 6, 7, 8, 9, 10})
    )
    with pytest.raises(NonFiniteError) as caught:
        rig.run()
    words = str(caught.value)
    assert words.startswith(
        "5 updates in a row were skipped (health.max_skipped_updates = 5): the loss is not"
    )
    assert "policy_loss_sum = nan" in words
    assert "learning rate 1e+30" in words
    assert steps_in(tmp_path) == [3, 5]
    assert sorted(rig.observer.rows) == list(range(10)), "what was reported until then stays"


def test_the_limit_is_the_users_and_a_finite_loss_blames_the_gradient(tmp_path: Path) -> None:
    config = make_config(health={"max_skipped_updates": 2}, checkpoint=EVERY)
    rig = Rig(config, tmp_path, learner=Skipping({2, 3}, loss=0.5))
    with pytest.raises(NonFiniteError, match=r"2 updates .* the loss is finite, its gradient is not"):
        rig.run()
    assert steps_in(tmp_path) == [1]


def test_a_short_run_that_only_skips_fails_too_and_saves_nothing(tmp_path: Path) -> None:
    rig = Rig(make_config(run={"steps": 3}), tmp_path, learner=Skipping({1, 2, 3}))
    with pytest.raises(NonFiniteError, match="every update of the run was skipped"):
        rig.run()
    assert steps_in(tmp_path) == []
    run_fit(fit_config(run={"steps": 3}), tmp_path / "one", SkippingTable({1, 3}))
    with pytest.raises(NonFiniteError, match="every update of the run was skipped"):
        run_fit(fit_config(run={"steps": 3}), tmp_path / "fit", SkippingTable({1, 2, 3}))
    assert steps_in(tmp_path / "fit") == []


def test_a_checkpoint_that_was_due_at_a_skipped_update_comes_after_the_next_one_made(tmp_path: Path) -> None:
    config = make_config(run={"steps": 6}, checkpoint={"every": 2, "keep_last": 9})
    Rig(config, tmp_path, learner=Skipping({2, 6})).run()
    assert steps_in(tmp_path) == [3, 4]
    fit = fit_config(run={"steps": 6}, checkpoint={"every": 2, "keep_last": 9})
    run_fit(fit, tmp_path / "fit", SkippingTable({2, 6}))
    assert steps_in(tmp_path / "fit") == [3, 4]


def test_a_fit_stops_at_the_limit_too(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="5 updates in a row were skipped"):
        run_fit(fit_config(run={"steps": 30}, checkpoint=EVERY), tmp_path, SkippingTable(set(range(3, 40))))
    assert steps_in(tmp_path) == [1, 2]


def test_updates_are_counted_one_by_one_and_one_that_is_made_begins_anew() -> None:
    skipped = SkippedUpdates(3)
    made, not_made = OptimResult(1, 0.1, 1.0), OptimResult(1, 0.1, math.inf, True)
    skipped.count([not_made, not_made, made], {})
    assert not skipped.last_was_skipped
    skipped.count([not_made], {})
    assert skipped.last_was_skipped
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        skipped.count([not_made, not_made], {})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def saving(folder: Path, **settings: Any) -> tuple[Saving, Clock]:
    clock = Clock()
    config = CheckpointConfig(**settings)
    return Saving(config, folder, (), RecordingObserver(), FakeLearner(), clock=clock), clock


def test_by_default_one_is_due_every_ten_minutes_and_at_the_end(tmp_path: Path) -> None:
    schedule, clock = saving(tmp_path)
    assert not schedule.is_due(1, ends=False, is_sound=True)
    clock.now = 599.0
    assert not schedule.is_due(2, ends=False, is_sound=True)
    clock.now = 601.0
    assert schedule.is_due(3, ends=False, is_sound=True)
    asyncio.run(schedule.write(LoopState(**{**vars(STATE), "step": 3})))
    assert not schedule.is_due(3, ends=True, is_sound=True), "it is there"
    clock.now = 1000.0
    assert not schedule.is_due(4, ends=False, is_sound=True)
    assert schedule.is_due(5, ends=True, is_sound=True)


def test_both_switched_off_there_are_none(tmp_path: Path) -> None:
    schedule, clock = saving(tmp_path, minutes=0.0)
    clock.now = 1e6
    assert not schedule.is_due(3, ends=True, is_sound=True)
    by_steps, _ = saving(tmp_path, minutes=0.0, every=3)
    assert [by_steps.is_due(step, ends=False, is_sound=True) for step in (1, 2, 3)] == [False, False, True]


def test_a_run_leaves_a_checkpoint_of_its_end_that_can_be_gone_on_from(tmp_path: Path) -> None:
    whole = Rig(make_config(run={"steps": 6}), tmp_path / "whole")
    whole.run()
    first = Rig(make_config(run={"steps": 4}), tmp_path / "half")
    first.run()
    chosen = choose_checkpoint(tmp_path / "half" / "checkpoints", LoopState.read)
    assert chosen.state.step == 4
    second = Rig(make_config(run={"steps": 6}), tmp_path / "half", resume=chosen.state)
    asyncio.run(second.learner.load(chosen.path / "learner"))
    second.run()
    assert second.learner.weight == whole.learner.weight
    assert steps_in(tmp_path / "half") == [4, 6]


class FailingEvaluation(CountingScorer):
    """Of the evaluation's prompts at one evaluation; ids below 0 are not of the training stream."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self._evaluations = number, 0

    async def score(self, group: Any) -> Any:
        if group.group_id < 0:
            self._evaluations += 1
            if self._evaluations > 3 * (self._number - 1):
                raise RuntimeError("the judge has gone home")
        return await super().score(group)


def test_a_due_checkpoint_is_there_before_the_evaluation_that_fails(tmp_path: Path) -> None:
    config = make_config(checkpoint={"every": 2}, eval={"every": 2})
    rig = Rig(config, tmp_path, scorer=FailingEvaluation(2))
    with pytest.raises(RuntimeError, match="gone home"):
        rig.run()
    chosen = choose_checkpoint(tmp_path / "checkpoints", LoopState.read)
    assert chosen.state.step == 2
    assert "objective/scores" in rig.observer.rows[2], "nor are the metrics of the step lost"
    resumed = Rig(config, tmp_path, resume=chosen.state)
    asyncio.run(resumed.learner.load(chosen.path / "learner"))
    resumed.run()
    whole = Rig(config, tmp_path / "whole")
    whole.run()
    assert resumed.learner.weight == whole.learner.weight
    for step in (2, 4, 6):
        assert resumed.observer.rows[step]["eval/score_mean"] == whole.observer.rows[step]["eval/score_mean"]


def test_a_failing_exit_leaves_a_checkpoint_of_the_state_between_steps(tmp_path: Path) -> None:
    class Dying(FakeRolloutWorker):
        async def rollout(self, task: Any) -> Any:
            if task.group_id >= 12:
                raise ConnectionError("the engine died")
            return await super().rollout(task)

    rig = Rig(make_config(), tmp_path, workers=[Dying()])
    with pytest.raises(ConnectionError):
        rig.run()
    chosen = choose_checkpoint(tmp_path / "checkpoints", LoopState.read)
    assert chosen.state.step == 3
    resumed = Rig(make_config(), tmp_path, resume=chosen.state)
    asyncio.run(resumed.learner.load(chosen.path / "learner"))
    resumed.run()
    whole = Rig(make_config(), tmp_path / "whole")
    whole.run()
    assert resumed.learner.weight == whole.learner.weight


def test_a_failure_within_an_update_leaves_none_of_a_torn_state(tmp_path: Path) -> None:
    class Breaking(FakeLearner):
        async def optim_step(self, params: OptimParams | None = None) -> OptimResult:
            result = await super().optim_step(params)
            if result.step == 3:
                raise ConnectionError("half an update")
            return result

    with pytest.raises(ConnectionError):
        Rig(make_config(), tmp_path, learner=Breaking()).run()
    assert steps_in(tmp_path) == []


def test_a_checkpoint_that_cannot_be_written_at_the_end_hides_no_failure(tmp_path: Path) -> None:
    class Dead(FakeLearner):
        async def save(self, folder: Path) -> None:
            await asyncio.Event().wait()

    class Dying(FakeRolloutWorker):
        async def rollout(self, task: Any) -> Any:
            if task.group_id >= 12:
                raise ConnectionError("the machine died")
            return await super().rollout(task)

    config = make_config(checkpoint={"exit_seconds": 0.05})
    with pytest.raises(ConnectionError, match="the machine died"):
        Rig(config, tmp_path, workers=[Dying()], learner=Dead()).run()
    assert steps_in(tmp_path) == []


def asking(rig: Rig, at: int, ask: Callable[[], None]) -> None:
    """Calls `ask` when the group of that id is begun."""
    worker = rig.workers[0]
    rollout = worker.rollout

    async def asked(task: Any) -> Any:
        if task.group_id == at:
            ask()
        return await rollout(task)

    worker.rollout = asked


def test_asked_to_stop_a_loop_saves_and_leaves_and_goes_on_the_same(tmp_path: Path) -> None:
    rig = Rig(make_config(), tmp_path)
    asking(rig, 13, rig.loop._stop.ask)
    with pytest.raises(StopAskedError):
        rig.run()
    chosen = choose_checkpoint(tmp_path / "checkpoints", LoopState.read)
    assert chosen.state.step == 3
    assert sorted(rig.observer.rows) == [0, 1, 2, 3]
    resumed = Rig(make_config(), tmp_path, resume=chosen.state)
    asyncio.run(resumed.learner.load(chosen.path / "learner"))
    resumed.run()
    whole = Rig(make_config(), tmp_path / "whole")
    whole.run()
    assert resumed.learner.weight == whole.learner.weight


@pytest.mark.parametrize(
    ("number", "error", "code"), [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)]
)
def test_the_first_signal_asks_and_the_second_leaves_at_once(number: int, error: Any, code: Any) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(number)
    stop = StopRequest()
    with pytest.raises(error) as caught, stop_signals(stop):
        os.kill(os.getpid(), number)
        assert stop.asked
        raise StopAskedError
    assert getattr(caught.value, "code", None) == code
    again = StopRequest()
    with pytest.raises(error), stop_signals(again):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        pytest.fail("the second signal has been swallowed")
    assert signal.getsignal(number) is before


def test_a_signal_in_a_fit_saves_after_the_update_under_way(tmp_path: Path) -> None:
    class Signalling(TableLearner):
        async def optim_step(self, params: OptimParams | None = None) -> OptimResult:
            if len(self.trained) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return await super().optim_step(params)

    from rl_cluster.data.pairs import FitSets
    from rl_cluster.loop.fit import FitLoop
    from tests.loop.test_fit_loop import Notes, make_rows

    async def train() -> None:
        stop = StopRequest()
        sets = FitSets(make_rows(5), None)
        config = fit_config(run={"steps": 9})
        loop = FitLoop(config, Signalling(), sets, Notes(), tmp_path, stop=stop)
        with stop_signals(stop):
            await loop.run()

    with pytest.raises(SystemExit):
        asyncio.run(train())
    assert steps_in(tmp_path) == [3]
