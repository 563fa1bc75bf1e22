"""Rollouts, reference and publication in the learner's own process: its live policy draws the samples.

Everything runs on the event loop's thread, a decoding step at a time: between two steps other coroutines get
their turn, so that deadlines, cancellation and Ctrl-C act within a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.episode import play_group
from actors.reference_model import ReferenceModel
from rl_cluster.assembly.together import Together
from rl_cluster.environments.playing.hosting import EnvironmentPool
from rl_cluster.modeling.generate import Drawing, Generation, Request
from rl_cluster.modeling.policy import PolicyModel
from rl_cluster.protocols import PublishReport
from rl_cluster.trajectory import (
    FinishReason,
    GroupSummary,
    GroupTask,
    SamplingSpec,
    TrajectoryGroup,
)


@dataclass(frozen=True)
class LocalSample:
    """Implements actors.episode.Drawn."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason


class LocalGenerator:
    """Implements actors.episode.Generator on a policy in this process.

    Requests that wait at the same time and draw alike are one batch; the others wait until it has ended.
    """

    def __init__(
        self, policy: PolicyModel, tokenizer: Any, eos_token_ids: frozenset[int], max_sequences: int
    ) -> None:
        self.version = 0
        self._policy = policy
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_sequences = max_sequences
        self._together = Together(self._generate, self._how_many)

    async def generate(self, prompt: Sequence[int], seed: int, sampling: SamplingSpec) -> LocalSample:
        """Draw one response; as actors.engine.Engine.generate."""
        request = Request(
            prompt=list(prompt),
            seed=seed,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=sampling.ends(self._eos_token_ids),
            stop=sampling.stop,
        )
        return await self._together.ask(
            (request, Drawing(sampling.temperature, sampling.top_k, sampling.top_p))
        )

    def close(self) -> None:
        self._together.close()

    def _how_many(self, items: Sequence[tuple[Request, Drawing]]) -> int:
        alike = 0
        while alike < min(len(items), self._max_sequences) and items[alike][1] == items[0][1]:
            alike += 1
        return alike

    async def _generate(
        self, items: Sequence[tuple[Request, Drawing]], abandoned: Callable[[], bool]
    ) -> list[LocalSample]:
        generation = Generation(self._policy, [request for request, _ in items], items[0][1], self._decode)
        while generation.step(self.version) and not abandoned():
            await asyncio.sleep(0)
        return [
            LocalSample(
                tokens=np.asarray(response.tokens, dtype=np.int32),
                logprobs=np.asarray(response.logprobs, dtype=np.float32),
                versions=np.asarray(response.versions, dtype=np.int32),
                finish_reason=response.finish_reason or "length",
            )
            for response in generation.responses
        ]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


class LocalRollout:
    """Implements protocols.RolloutWorker; a group's Ref is the TrajectoryGroup itself.

    Evaluations have a generator of their own, so that what is drawn for training, to the last bit, does not
    depend on whether an evaluation happens to run at the same time.
    """

    def __init__(
        self,
        training: LocalGenerator,
        evaluation: LocalGenerator,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        max_sequence_tokens: int,
        environments: EnvironmentPool | None = None,
        name: str = "rollout-0",
    ) -> None:
        """max_sequence_tokens, environments: as actors.episode.play_group."""
        self.name = name
        self._max_sequence_tokens = max_sequence_tokens
        self._environments = environments
        self.training, self.evaluation = training, evaluation
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids

    async def rollout(self, task: GroupTask) -> tuple[GroupSummary, TrajectoryGroup]:
        """Play the task's episodes, each with its own seed."""
        begun = time.monotonic()
        group = await play_group(
            self.evaluation if task.group_id < 0 else self.training,
            self._tokenizer,
            self._eos_token_ids,
            task,
            self._environments,
            self._max_sequence_tokens,
        )
        return group.summary(self.name, time.monotonic() - begun), group

    def set_version(self, version: int) -> None:
        self.training.version = self.evaluation.version = version

    def close(self) -> None:
        self.training.close()
        self.evaluation.close()
        if self._environments is not None:
            self._environments.close()


@dataclass(frozen=True)
class LocalPublisher:
    """Implements protocols.WeightPublisher: the rollouts use the learner's own tensors, nothing travels."""

    rollout: LocalRollout

    async def publish(self, version: int) -> PublishReport:
        self.rollout.set_version(version)
        return PublishReport(version, seconds=0.0, pause_seconds=0.0, num_bytes=0)


class LocalReference:
    """Implements protocols.Reference; groups that wait at the same time share their forward passes."""

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        self._together = Together(self._logprobs)

    async def logprobs(self, group: TrajectoryGroup) -> np.ndarray:
        return await self._together.ask(group)

    def close(self) -> None:
        self._together.close()

    async def _logprobs(
        self, groups: Sequence[TrajectoryGroup], abandoned: Callable[[], bool]
    ) -> list[np.ndarray]:
        del abandoned
        whole = self._model.logprobs_of([t for group in groups for t in group.trajectories])
        sizes = [sum(len(t.tokens) for t in group.trajectories) for group in groups]
        return np.split(whole, np.cumsum(sizes)[:-1])
