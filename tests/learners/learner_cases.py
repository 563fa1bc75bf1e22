"""A tiny model folder, random batches and specs that the learner tests share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from learners.rank import LearnerRank
from learners.spec import LearnerSpec
from rl_cluster.algorithms.steps import PolicyStep
from rl_cluster.batch import TokenBatch
from rl_cluster.config.algorithm import PolicyLossConfig
from rl_cluster.config.run import OptimizerConfig
from rl_cluster.modeling.scratch import save_scratch_model
from rl_cluster.protocols import BatchLayout
from tests.common.settings import TINY

STEP = PolicyStep(PolicyLossConfig(aggregation="token_mean"), temperature=0.9)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.5, schedule="linear", warmup_steps=2)
BF16_OPTIMIZER = OptimizerConfig(
    learning_rate=0.05, betas=(0.8, 0.95), eps=0.02, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2
)
"""eps is of the size of a gradient: an update then follows its length, not only its sign, which is noise."""


def make_model(folder: Path, seed: int = 0) -> str:
    save_scratch_model(TINY, folder, seed)
    return str(folder)


def make_batch(num_rows: int = 13, seed: int = 0) -> TokenBatch:
    """Rows of 4 to 24 tokens, prompts of different lengths, every column filled."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(4, 25, num_rows).astype(np.int32)
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    mask = np.zeros(total, dtype=bool)
    for start, length in zip(starts, lengths, strict=True):
        mask[start + generator.integers(1, length) : start + length] = True

    def noise(scale: float) -> np.ndarray:
        return (scale * generator.normal(size=total)).astype(np.float32)

    return TokenBatch(
        tokens=generator.integers(3, 20, total).astype(np.int32),
        lengths=lengths,
        action_mask=mask,
        units=np.arange(num_rows, dtype=np.int32),
        group_ids=np.arange(num_rows, dtype=np.int32) // 4,
        behaviour_logprobs=-3 + noise(0.1),
        proximal_logprobs=-3 + noise(0.1),
        values=noise(0.1),
        advantages=noise(1.0),
        returns=noise(1.0),
    )


def layout_of(batch: TokenBatch) -> BatchLayout:
    return BatchLayout(
        lengths=tuple(batch.lengths.tolist()),
        action_counts=tuple(batch.action_counts.tolist()),
        units=tuple(batch.units.tolist()),
        group_ids=tuple(batch.group_ids.tolist()),
    )


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, relative to the largest number of the second."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def movement_agrees(
    start: dict[str, np.ndarray], ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]
) -> bool:
    """Whether both moved alike from `start`: the difference at most 5 % of the movement, tensor by tensor in
    L2 where it moved at all. bfloat16 gradients of differently packed rows agree to 1 or 2 %."""
    assert start.keys() == ours.keys() == theirs.keys()
    for name, begin in start.items():
        one, other = ours[name] - begin, theirs[name] - begin
        if np.linalg.norm(one - other) > 0.05 * np.linalg.norm(other) + 1e-6:
            return False
    return True


def spec_of(model_path: str, **settings: object) -> LearnerSpec:
    base = LearnerSpec(model_path, engine="torch", optimizer=OPTIMIZER, total_steps=10, temperature=0.9)
    return replace(base, **settings)  # type: ignore[arg-type]


def weights_of(rank: LearnerRank) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for group in rank.weight_groups() for name, tensor in group}


def gradients_of(rank: LearnerRank) -> np.ndarray:
    return np.concatenate(
        [p.grad.flatten().numpy() for p in rank.model.parameters() if p.requires_grad and p.grad is not None]
    )
