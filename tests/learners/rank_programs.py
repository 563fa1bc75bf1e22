"""What the tests run on every rank of a living group: each builds its own learner in the same processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learners.rank import LearnerRank
from learners.spec import LearnerSpec
from rl_cluster.algorithms.steps import LossStep
from rl_cluster.algorithms.weights import row_weights
from rl_cluster.batch import TokenBatch, plan_shards
from rl_cluster.protocols import OptimParams, OptimResult

Weights = dict[str, np.ndarray]


def weights_of(rank: LearnerRank) -> Weights:
    return {name: t.float().numpy().copy() for group in rank.weight_groups() for name, t in group}


def backward(
    rank: LearnerRank, batch: TokenBatch, budgets: Sequence[int], step: LossStep
) -> dict[str, float]:
    """One optimizer step's gradient, its rows split over len(budgets) calls, each with its own budget."""
    weights = row_weights("token_mean", batch.action_counts, 128)
    rows = np.array_split(np.arange(batch.num_rows), len(budgets))
    totals: dict[str, float] = {}
    for chosen, budget in zip(rows, budgets, strict=True):
        plan = plan_shards(batch.lengths, chosen.tolist(), batch.units, rank.world_size, budget)
        totals, _ = rank.forward_backward(batch, plan.micro_batches[rank.rank], weights, step)
    return totals


def train(
    here: LearnerRank, spec: LearnerSpec, batches: Sequence[TokenBatch], step: LossStep, budget: int
) -> tuple[list[OptimResult], Weights, list[tuple[str, tuple[int, ...]]]]:
    """Updates on each batch in turn; forward passes in between must not matter."""
    rank = LearnerRank(spec, here.rank, here.world_size)
    results = []
    for number, batch in enumerate(batches):
        backward(rank, batch, [budget], step)
        if number % 2:
            rank.forward_part(batch, [(0, 1)], reference=False)
        results.append(rank.optim_step(OptimParams()))
    return results, weights_of(rank), [(meta.name, meta.shape) for meta in rank.weight_metadata()]


def train_with(
    here: LearnerRank,
    spec: LearnerSpec,
    batches: Sequence[TokenBatch],
    step: LossStep,
    params: Sequence[OptimParams],
) -> tuple[list[OptimResult], Weights]:
    """An update per batch, each with its own settings. Before each there is a gradient to be forgotten."""
    rank = LearnerRank(spec, here.rank, here.world_size)
    results = []
    for batch, settings in zip(batches, params, strict=True):
        backward(rank, batches[0], [60], step)
        rank.forget_gradient()
        backward(rank, batch, [60], step)
        results.append(rank.optim_step(settings))
    return results, weights_of(rank)


def gradient(
    here: LearnerRank, spec: LearnerSpec, batch: TokenBatch, budgets: Sequence[int], step: LossStep
) -> np.ndarray:
    """The whole gradient, from ZeRO's partitions or from plain PyTorch."""
    from deepspeed.utils import safe_get_full_grad

    rank = LearnerRank(spec, here.rank, here.world_size)
    backward(rank, batch, budgets, step)
    parts = []
    for parameter in rank.model.parameters():
        whole = safe_get_full_grad(parameter) if spec.engine == "deepspeed" else parameter.grad
        parts.append(whole.flatten().float().numpy())
    return np.concatenate(parts)


def resume(
    here: LearnerRank, spec: LearnerSpec, batches: Sequence[TokenBatch], step: LossStep, folder: Path
) -> tuple[Weights, Weights]:
    """Weights after all batches: without interruption, and with a save and a load in the middle."""
    middle = len(batches) // 2
    straight = LearnerRank(spec, here.rank, here.world_size)
    for number, batch in enumerate(batches):
        if number == middle:
            straight.save(folder)
        backward(straight, batch, [60], step)
        straight.optim_step(OptimParams())
    resumed = LearnerRank(spec, here.rank, here.world_size)
    torch.manual_seed(999)
    resumed.load(folder)
    for batch in batches[middle:]:
        backward(resumed, batch, [60], step)
        resumed.optim_step(OptimParams())
    return weights_of(straight), weights_of(resumed)


def warm_up(
    here: LearnerRank,
    spec: LearnerSpec,
    batches: Sequence[TokenBatch],
    steps: Sequence[LossStep],
    folder: Path,
) -> list[Weights]:
    """Weights at first and after each (batch, step); saved and loaded into another rank after the second."""
    rank = LearnerRank(spec, here.rank, here.world_size)
    weights = [weights_of(rank)]
    for number, (batch, step) in enumerate(zip(batches, steps, strict=True)):
        if number == 2:
            rank.save(folder)
            rank = LearnerRank(spec, here.rank, here.world_size)
            rank.load(folder)
        backward(rank, batch, [60], step)
        rank.optim_step(OptimParams())
        weights.append(weights_of(rank))
    return weights


def skip(
    here: LearnerRank, spec: LearnerSpec, batch: TokenBatch, broken: TokenBatch, step: LossStep
) -> tuple[list[OptimResult], Weights, Weights, Weights]:
    """Weights at first, after a step whose gradient is not finite, and after a good one."""
    rank = LearnerRank(spec, here.rank, here.world_size)
    weights = [weights_of(rank)]
    results = []
    for candidate in (broken, batch):
        backward(rank, candidate, [60], step)
        results.append(rank.optim_step(OptimParams()))
        weights.append(weights_of(rank))
    return results, weights[0], weights[1], weights[2]


def export(here: LearnerRank, spec: LearnerSpec, folder: Path) -> None:
    LearnerRank(spec, here.rank, here.world_size).export(folder)


def die_on(here: LearnerRank, victim: int) -> None:
    if here.rank == victim:
        os._exit(3)
    threading.Event().wait()  # no answer, ever


def describe(here: LearnerRank) -> Any:
    return here.rank, here.world_size, torch.get_num_threads()
