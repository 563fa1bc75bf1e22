"""The seams: what the loop knows of its workers. On Ray, in this process, or a fake: the loop cannot tell.

A `Ref` is an opaque handle on something big (a Ray ObjectRef, or the object itself in one process).
The loop passes Refs on; only workers look inside. Every method may raise an error of rl_cluster.errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl_cluster.batch import TokenBatch
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import GroupSummary, GroupTask, ScoreFailure, Scores

Ref = Any


class RolloutWorker(Protocol):
    """One inference engine that plays episodes."""

    name: str

    async def rollout(self, task: GroupTask) -> tuple[GroupSummary, Ref]:
        """Sample the task's group. The Ref is a TrajectoryGroup."""
        ...


class Scorer(Protocol):
    """Scores finished groups; `weight` is what its values are multiplied with in the sum."""

    name: str
    weight: float

    async def score(self, group: Ref) -> Scores | ScoreFailure:
        """One value per trajectory of the group, or a typed failure; never raises for the user's code."""
        ...


class Reference(Protocol):
    """The frozen policy that the KL divergence is measured against."""

    async def logprobs(self, group: Ref) -> Ref:
        """float32 [T]: log-probabilities of the group's tokens, its trajectories laid end to end."""
        ...


@dataclass(frozen=True)
class ForwardOutput:
    """Per-token results in input order (packing and sharding undone), T tokens.

    logprobs, entropy: float32 [T], at the sampling temperature, 0 where not an action; logprobs [T, K] of a
    batch with K target ids per action.
    values: float32 [T] or None, the critic's value of the state before each action, 0 elsewhere.
    kl: float32 [T] or None, KL(policy ‖ reference) in nats over the whole vocabulary, at the sampling
    temperature, of a reference pass of a learner that holds both models.
    """

    logprobs: np.ndarray
    entropy: np.ndarray
    values: np.ndarray | None = None
    kl: np.ndarray | None = None


@dataclass(frozen=True)
class OptimParams:
    """What may change from step to step. None: as the learner was started, learning_rate by its schedule.

    gradient_scale: what the accumulated gradient is multiplied with before it is measured and clipped, for
    sums whose weights are known only now (1 / Σ tokens).
    """

    learning_rate: float | None = None
    max_grad_norm: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    gradient_scale: float = 1.0

    def check(self) -> None:
        """Raise BadInputError for what would spoil the weights."""
        names = {"learning_rate": "learning rate", "eps": "eps", "weight_decay": "weight_decay"}
        for name, shown in names.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0.0):
                raise BadInputError(f"{shown} {value}: must be a finite number of at least 0.")
        if self.max_grad_norm is not None and not self.max_grad_norm >= 0.0:
            raise BadInputError(f"max_grad_norm {self.max_grad_norm}: must be at least 0 (no clipping).")
        if self.betas is not None and not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise BadInputError(f"betas {self.betas}: must be two numbers of at least 0 and below 1.")
        if not (math.isfinite(self.gradient_scale) and self.gradient_scale > 0.0):
            raise BadInputError(f"gradient_scale {self.gradient_scale}: must be a finite number above 0.")


@dataclass(frozen=True)
class OptimResult:
    """grad_norm: L2, before clipping. skipped: the gradient was not finite, nothing was changed."""

    step: int
    learning_rate: float
    grad_norm: float
    skipped: bool = False


class Learner(Protocol):
    """A model that takes gradients, on one or many ranks; calls take effect in order.

    A batch is a Ref of a TokenBatch; `lengths`, `action_counts` and `units` are per row of that batch.
    `rows` chooses a part of it. Gradients accumulate, as plain sums over tokens, until `optim_step`.
    """

    async def forward(self, batch: Ref, layout: BatchLayout, *, reference: bool = False) -> Ref:
        """A Ref of ForwardOutput for the whole batch. reference=True: of the frozen copy that the learner
        holds beside the model, or of the model with its adapters switched off."""
        ...

    async def forward_backward(
        self, batch: Ref, layout: BatchLayout, rows: Sequence[int], loss: Any
    ) -> tuple[dict[str, float], Ref]:
        """Accumulate the gradient of sum over the rows' tokens; `loss` is a config of algorithms/table.py.

        Returns sums over all ranks (keys ending in `_sum`) and extremes (`_max`), no hidden mean; and a Ref
        of the log-probabilities of this pass, as in ForwardOutput, in the batch's order, at the step's
        temperature, 0 where not an action of `rows`.
        """
        ...

    async def optim_step(self, params: OptimParams | None = None) -> OptimResult:
        """Update with what has accumulated, which is then forgotten."""
        ...

    async def forget_gradient(self) -> None:
        """Drop what has accumulated since the last optim_step, be it nothing."""
        ...

    async def save(self, folder: Path) -> None:
        """Weights, optimizer, scheduler and RNG of every rank, such that `load` continues bit for bit."""
        ...

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path) -> None:
        """An ordinary Hugging Face folder (a peft adapter under LoRA), without tokenizer and card."""
        ...

    async def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """The answer of a pure, importable function, run where the batch lives (rank 0), Refs among args
        resolved."""
        ...

    async def compute(self, function: Callable[..., tuple[Any, Any]], *args: Any) -> tuple[Any, Ref]:
        """As ask, of a function that returns (small, big): the first comes as it is, the second as a Ref."""
        ...

    def put(self, value: Any) -> Ref:
        """A Ref of something that the driver has."""
        ...


@dataclass(frozen=True)
class BatchLayout:
    """What the driver knows of a TokenBatch without looking inside; tuples of N, one entry per row."""

    lengths: tuple[int, ...]
    action_counts: tuple[int, ...]
    units: tuple[int, ...]
    group_ids: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @staticmethod
    def of(batch: TokenBatch, action_counts: np.ndarray | None = None) -> BatchLayout:
        """action_counts: int [N], where not every drawn token trains; default: the batch's own."""
        counts = batch.action_counts if action_counts is None else action_counts
        return BatchLayout(
            lengths=tuple(batch.lengths.tolist()),
            action_counts=tuple(counts.tolist()),
            units=tuple(batch.units.tolist()),
            group_ids=tuple(batch.group_ids.tolist()),
        )


@dataclass(frozen=True)
class PublishReport:
    """seconds: whole publication. pause_seconds: longest time an engine stood still.
    num_bytes: sent once, whatever the number of receivers."""

    version: int
    seconds: float
    pause_seconds: float
    num_bytes: int


class WeightPublisher(Protocol):
    """Carries the learner's weights into every engine."""

    async def publish(self, version: int) -> PublishReport:
        """Return only when every engine has proved, by digests of what it loaded and serves, that it has
        `version`; with one model for both, the number alone changes."""
        ...


@dataclass(frozen=True)
class SampleRow:
    """One line of the table of sampled completions. score: NaN where no scorer gave a reward."""

    query: str
    response: str
    score: float

    @property
    def score_text(self) -> str:
        """For a table."""
        return "none" if math.isnan(self.score) else f"{self.score:.3f}"


class Observer(Protocol):
    """Who watches a run: files, console, TensorBoard. Called from the loop's thread, must be quick."""

    def phase(self, name: str) -> None:
        """What the loop waits for now: generating, training, publishing, evaluating, saving."""
        ...

    def metrics(self, step: int, metrics: dict[str, float | None]) -> None: ...

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None: ...
