"""Workers without Ray, vLLM or DeepSpeed, for tests of the loop: a policy that is a single number.

The fake policy answers every prompt with tokens that are 1 with probability sigmoid(weight), else 0; the
fake scorer counts the ones; the fake learner moves the weight along the policy gradient.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_cluster.batch import TokenBatch
from rl_cluster.protocols import (
    BatchLayout,
    ForwardOutput,
    OptimParams,
    OptimResult,
    PublishReport,
    SampleRow,
)
from rl_cluster.trajectory import (
    GroupSummary,
    GroupTask,
    Prompt,
    ScoreFailure,
    Scores,
    Trajectory,
    TrajectoryGroup,
)


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"row {i}", np.array([i + 10, 5], dtype=np.int32), f"prompt {i}") for i in range(count)]


def logprob_of_one(weight: float) -> float:
    return -math.log1p(math.exp(-weight))


class FakeRolloutWorker:
    """delay(task) gives the asyncio ticks that a group takes, to make groups finish out of order."""

    def __init__(self, name: str = "rollout-0", delay: Callable[[GroupTask], int] = lambda _: 1) -> None:
        self.name = name
        self.weight = 0.0
        self.version = 0
        self.tasks: list[GroupTask] = []
        self._delay = delay

    async def rollout(self, task: GroupTask) -> tuple[GroupSummary, TrajectoryGroup]:
        self.tasks.append(task)
        samples = [self._sample(task.prompt, seed) for seed in task.seeds]
        for _ in range(self._delay(task)):
            await asyncio.sleep(0)
        group = TrajectoryGroup(task.group_id, task.prompt, tuple(samples))
        return group.summary(self.name, 0.0), group

    def _sample(self, prompt: Prompt, seed: int) -> Trajectory:
        generator = np.random.default_rng(seed)
        ones = generator.random(3) < math.exp(logprob_of_one(self.weight))
        logprobs = np.where(ones, logprob_of_one(self.weight), logprob_of_one(-self.weight))
        start = len(prompt.tokens)
        return Trajectory(
            tokens=np.concatenate([prompt.tokens, ones]).astype(np.int32),
            action_mask=np.arange(start + 3) >= start,
            behaviour_logprobs=np.concatenate([np.zeros(start), logprobs]).astype(np.float32),
            policy_versions=np.array([-1] * start + [self.version] * 3, dtype=np.int32),
            finish_reason="stop",
            response_text=" ".join(str(int(one)) for one in ones),
            ended_with_eos=True,
        )


class CountingScorer:
    """The number of ones; or whatever `answers` gives for a group id."""

    def __init__(self, answers: Callable[[int], Scores | ScoreFailure | None] = lambda _: None) -> None:
        self.name = "ones"
        self.weight = 1.0
        self.calls: list[int] = []
        self._answers = answers

    async def score(self, group: TrajectoryGroup) -> Scores | ScoreFailure:
        self.calls.append(group.group_id)
        values = [float(t.tokens[t.action_mask].sum()) for t in group.trajectories]
        return self._answers(group.group_id) or Scores(self.name, np.array(values))


@dataclass(frozen=True)
class Asked:
    """One forward_backward as the learner was asked for it: the step object, the rows, the whole batch."""

    step: Any
    rows: tuple[int, ...]
    layout: BatchLayout
    batch: TokenBatch


class FakeLearner:
    """Plain policy gradient on the one weight; records what it was asked.

    calls: the verbs in order. asked: every forward_backward. optim_params: what each optim_step was given.
    value: what its forward pass says of every state.
    """

    def __init__(self, learning_rate: float = 0.5) -> None:
        self.weight = 0.0
        self.calls: list[str] = []
        self.trained_groups: list[int] = []
        self.asked: list[Asked] = []
        self.optim_params: list[OptimParams | None] = []
        self.value = 0.0
        self._gradient = 0.0
        self._learning_rate = learning_rate
        self._step = 0

    async def forward(
        self, batch: TokenBatch, layout: BatchLayout, *, reference: bool = False
    ) -> ForwardOutput:
        self.calls.append("reference" if reference else "forward")
        logprobs = self._logprobs(batch, 0.0 if reference else self.weight)
        values = np.where(batch.action_mask, self.value, 0.0).astype(np.float32)
        return ForwardOutput(logprobs, -logprobs, values)

    async def forward_backward(
        self, batch: TokenBatch, layout: BatchLayout, rows: Sequence[int], loss: Any
    ) -> tuple[dict[str, float], np.ndarray]:
        self.calls.append("forward_backward")
        self.asked.append(Asked(loss, tuple(rows), layout, batch))
        await asyncio.sleep(0)
        chosen = batch.select(rows)
        assert chosen.advantages is not None
        self.trained_groups += sorted({int(g) for g in chosen.group_ids})
        slope = (chosen.tokens == 1) - math.exp(logprob_of_one(self.weight))
        self._gradient += float((chosen.advantages * slope)[chosen.action_mask].mean())
        sums = {"tokens_sum": float(chosen.action_mask.sum()), "policy_loss_sum": 0.0, "gap_max": 0.0}
        if chosen.weights is not None:
            sums["loss_sum"] = -float((chosen.weights * chosen.advantages)[chosen.action_mask].sum())
        return sums, self._logprobs(batch, self.weight)

    @staticmethod
    def _logprobs(batch: TokenBatch, weight: float) -> np.ndarray:
        one, zero = logprob_of_one(weight), logprob_of_one(-weight)
        return np.where(batch.action_mask, np.where(batch.tokens == 1, one, zero), 0.0).astype(np.float32)

    async def optim_step(self, params: OptimParams | None = None) -> OptimResult:
        self.calls.append("optim_step")
        self.optim_params.append(params)
        self.weight += self._learning_rate * self._gradient
        norm, self._gradient = abs(self._gradient), 0.0
        self._step += 1
        return OptimResult(self._step, self._learning_rate, norm)

    async def forget_gradient(self) -> None:
        self.calls.append("forget_gradient")
        self._gradient = 0.0

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weight.json").write_text(json.dumps([self.weight, self._step]))

    async def load(self, folder: Path) -> None:
        self.weight, self._step = json.loads((folder / "weight.json").read_text())

    async def export(self, folder: Path) -> None:
        await self.save(folder)

    async def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    async def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def put(self, value: Any) -> Any:
        return value


class FakePublisher:
    def __init__(self, learner: FakeLearner, workers: Sequence[FakeRolloutWorker]) -> None:
        self._learner, self._workers = learner, workers

    async def publish(self, version: int) -> PublishReport:
        for worker in self._workers:
            worker.weight, worker.version = self._learner.weight, version
        return PublishReport(version, 0.0, 0.0, 8)


class FakeReference:
    async def logprobs(self, group: TrajectoryGroup) -> np.ndarray:
        batch = TokenBatch.from_trajectories(group.trajectories, [group.group_id] * len(group.trajectories))
        return np.where(batch.action_mask, math.log(0.5), 0.0).astype(np.float32)


class RecordingObserver:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.rows: dict[int, dict[str, float | None]] = {}
        self.tables: dict[int, list[SampleRow]] = {}

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def metrics(self, step: int, metrics: dict[str, float | None]) -> None:
        assert step not in self.rows, f"step {step} reported twice"
        self.rows[step] = dict(metrics)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self.tables[step] = list(rows)
