"""One batch through the learner: advantages, then epochs × mini-batches of gradient and update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_cluster.algorithms.table import (
    PolicyStep,
    ValueStep,
    critic_of,
    needs_critic,
    policy_step,
    value_step,
)
from rl_cluster.algorithms.totals import add_metrics
from rl_cluster.config.run import RunConfig, importance_cap
from rl_cluster.loop.buffer import ReadyGroup
from rl_cluster.loop.experience import BatchStats, add_advantages, assemble
from rl_cluster.protocols import BatchLayout, Learner, OptimResult, Ref


@dataclass(frozen=True)
class StepResult:
    """sums: what the losses counted, over all updates of the step, with their number under `updates_sum`;
    critic_sums: the same of a separate critic. batch: Ref of the TokenBatch.
    stats_are_behaviours: the samples are of older weights and nothing asked for the present policy before the
    update, so that its divergence and entropy stand in sums only."""

    layout: BatchLayout
    batch: Ref
    stats: BatchStats
    sums: dict[str, float]
    critic_sums: dict[str, float]
    optim: tuple[OptimResult, ...]
    critic_optim: tuple[OptimResult, ...] = ()
    stats_are_behaviours: bool = False


class TrainStep:
    """The arithmetic of one step, given its learner(s); knows nothing of generation."""

    def __init__(
        self, config: RunConfig, learner: Learner, critic: Learner | None, learner_is_reference: bool
    ) -> None:
        """learner_is_reference: the learner answers for the reference, too (a pass with reference=True)."""
        algorithm = config.algorithm
        self._config = config
        self._learner = learner
        self._critic = critic
        self._learner_is_reference = learner_is_reference
        several_updates = algorithm.num_epochs * algorithm.num_mini_batches > 1
        off_policy = config.asynchrony.max_policy_lag > 0
        # With one update the present policy is the old one, and the loss has its log-probabilities anyway.
        kl_comes_first = algorithm.kl.coef > 0 and (
            algorithm.kl.place != "loss" or algorithm.kl.controller == "adaptive"
        )
        self._needs_pass_before = (
            several_updates or needs_critic(algorithm) or (off_policy and kl_comes_first)
        )
        self._stats_are_behaviours = off_policy and not self._needs_pass_before

    async def run(
        self, groups: Sequence[ReadyGroup], scores: np.ndarray, kl_coef: float, step: int
    ) -> StepResult:
        """scores: float64 [N], shaped, in the order of the groups' samples. step: counted from 1."""
        layout, batch = await self._assemble(groups)
        reference = policy = critic = None
        if self._learner_is_reference:
            reference = await self._learner.forward(batch, layout, reference=True)
        if self._needs_pass_before:
            policy = await self._learner.forward(batch, layout)
        if self._critic is not None:
            critic = await self._critic.forward(batch, layout)
        stats, batch = await self._learner.compute(
            add_advantages,
            self._config.algorithm,
            scores,
            kl_coef,
            batch,
            reference,
            policy,
            critic,
            step - 1,
        )
        updates = await self._update(batch, layout, kl_coef, step)
        return StepResult(layout, batch, stats, *updates, self._stats_are_behaviours)

    async def _assemble(self, groups: Sequence[ReadyGroup]) -> tuple[BatchLayout, Ref]:
        references = [group.reference for group in groups if group.reference is not None]
        assert len(references) in (0, len(groups))
        mask_truncated = self._config.algorithm.loss.mask_truncated
        refs = [group.group for group in groups] + references
        return await self._learner.compute(assemble, len(groups), mask_truncated, *refs)

    async def _update(
        self, batch: Ref, layout: BatchLayout, kl_coef: float, step: int
    ) -> tuple[dict[str, float], dict[str, float], tuple[OptimResult, ...], tuple[OptimResult, ...]]:
        """The sums of the policy's losses and of a separate critic's, the policy's updates and its."""
        of_policy, of_critic = self._loss_steps(kl_coef, step)
        sums: dict[str, float] = {}
        critic_sums: dict[str, float] = {}
        optim: list[OptimResult] = []
        critic_optim: list[OptimResult] = []
        for rows in self._mini_batches(layout.num_rows, step):
            if self._critic is not None:
                part, _ = await self._critic.forward_backward(batch, layout, rows, of_critic)
                add_metrics(critic_sums, part | {"updates_sum": 1.0})
                critic_optim.append(await self._critic.optim_step())
                if not of_policy.train_policy:
                    continue
            part, _ = await self._learner.forward_backward(batch, layout, rows, of_policy)
            add_metrics(sums, part | {"updates_sum": 1.0})
            optim.append(await self._learner.optim_step())
            if self._has_moved_too_far(part):
                break
        return sums, critic_sums, tuple(optim), tuple(critic_optim)

    def _loss_steps(self, kl_coef: float, step: int) -> tuple[PolicyStep, ValueStep | None]:
        config = self._config
        critic = critic_of(config.algorithm)
        of_policy = policy_step(
            config.algorithm,
            temperature=config.rollout.temperature,
            kl_coef=kl_coef,
            importance_cap=importance_cap(config),
            train_policy=critic is None or step > critic.warmup_steps,
            version=step - 1,
        )
        return of_policy, None if critic is None else value_step(critic, config.rollout.temperature)

    def _has_moved_too_far(self, part: dict[str, float]) -> bool:
        """part: the sums of one update, whose forward pass was before it."""
        limit, total = self._config.algorithm.stop_at_approx_kl, part.get("weight_total", 0.0)
        return limit is not None and total > 0 and part.get("approxkl_weighted", 0.0) / total > limit

    def _mini_batches(self, num_rows: int, step: int) -> list[list[int]]:
        """Rows of every update of the step: each epoch a fresh seeded shuffle, cut into equal parts."""
        algorithm = self._config.algorithm
        if algorithm.num_epochs == algorithm.num_mini_batches == 1:
            return [list(range(num_rows))]
        generator = np.random.default_rng([self._config.run.seed, step])
        size = math.ceil(num_rows / algorithm.num_mini_batches)
        updates = []
        for _ in range(algorithm.num_epochs):
            order = generator.permutation(num_rows).tolist()
            updates += [order[start : start + size] for start in range(0, num_rows, size)]
        return updates[: self._updates_left(step)]

    def _updates_left(self, step: int) -> int | None:
        """How many of run.max_updates the steps before this one have left; None: no limit."""
        algorithm, limit = self._config.algorithm, self._config.run.max_updates
        if limit is None:
            return None
        return max(0, limit - (step - 1) * algorithm.num_epochs * algorithm.num_mini_batches)
