"""Ray workers that hold a reward-model checkpoint: groups in, scores or failures out; how to start them."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray

from actors.scorer_handle import Limits, RayScorer
from rl_cluster.config.reward import RewardModelScorer
from rl_cluster.rewards.calling import Outcome
from rl_cluster.rewards.local_reward_model import LocalRewardModel
from rl_cluster.rewards.reward_model import check_reward_model, load_reward_model
from rl_cluster.trajectory import TrajectoryGroup

CALLS_PER_WORKER = 256
"""Groups that may wait in one worker, to be gathered into batches."""


class RewardModelWorker:
    """One copy of the checkpoint; concurrent requests are gathered into batches."""

    def __init__(
        self, name: str, config: RewardModelScorer, policy_tokenizer: Any, device: str, num_threads: int
    ) -> None:
        self._name = name
        self._config = config
        self._policy_tokenizer = policy_tokenizer
        self._device = device
        self._num_threads = num_threads
        self._scorer: LocalRewardModel | None = None

    async def start(self) -> int:
        """Load the checkpoint; returns the process id. BadInputError as load_reward_model."""
        import torch

        torch.set_num_threads(self._num_threads)
        model = load_reward_model(
            self._config.path,
            self._policy_tokenizer,
            tokens_per_batch=self._config.tokens_per_batch,
            dtype=self._config.dtype,
            device=self._device,
        )
        # Without a limit here: the handle's deadline ends this process.
        self._scorer = LocalRewardModel(self._name, model)
        return os.getpid()

    async def score(self, *groups: TrajectoryGroup) -> list[Outcome]:
        """One outcome per group, in order."""
        assert self._scorer is not None, "start() comes first"
        return list(await asyncio.gather(*(self._scorer.score(group) for group in groups)))


def make_reward_model_scorer(
    config: RewardModelScorer,
    name: str,
    policy_tokenizer: Any,
    *,
    device: str = "cpu",
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    start_seconds: float = 600.0,
) -> RayScorer:
    """A scorer on `config.num_workers` copies of the checkpoint, not started yet.

    The path is checked here first (BadInputError). num_cpus, num_gpus: what each worker reserves; it computes
    with as many threads as CPUs, at least one.
    """
    check_reward_model(config.path)
    num_threads = max(1, int(num_cpus))
    actor = ray.remote(RewardModelWorker)
    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "max_concurrency": CALLS_PER_WORKER,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(num_threads)}},
    }

    def make_worker(worker_name: str) -> Any:
        del worker_name  # Ray's own names must be unique in a cluster; ours need not be
        return actor.options(**options).remote(name, config, policy_tokenizer, device, num_threads)

    limits = Limits(
        timeout_seconds=config.timeout_seconds,
        num_workers=config.num_workers,
        calls_per_worker=CALLS_PER_WORKER,
        start_seconds=start_seconds,
    )
    return RayScorer(name, config.weight, make_worker, limits)
