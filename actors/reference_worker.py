"""The frozen reference policy as a Ray actor: groups in, log-probabilities of their tokens out.

Ref of a TrajectoryGroup → Ref of float32 [T], its trajectories laid end to end, 0 where not an action.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import ray

from rl_cluster.protocols import Ref
from rl_cluster.ray_answers import CONTROL_SECONDS, answer
from rl_cluster.trajectory import TrajectoryGroup


@dataclass(frozen=True)
class ReferenceSpec:
    """temperature: of the sampling, so that the log-probabilities compare with the policy's.
    tokens_per_pass: upper bound on the packed tokens of one forward pass (a longer sequence goes alone).
    deadline_seconds: for one group, its time in the queue behind other groups included."""

    model: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    temperature: float = 1.0
    tokens_per_pass: int = 8192
    num_threads: int = 1
    trust_remote_code: bool = False
    deadline_seconds: float = 3600.0

    @property
    def environment(self) -> dict[str, str]:
        """Before PyTorch is imported. Idle OpenMP threads sleep rather than spin."""
        if self.device == "cuda":
            return {}
        return {"OMP_NUM_THREADS": str(self.num_threads), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


class ReferenceModel:
    """The model itself, without Ray."""

    def __init__(self, spec: ReferenceSpec) -> None:
        import torch

        from rl_cluster.modeling.load import load_policy

        if spec.device == "cpu":
            torch.set_num_threads(spec.num_threads)
        self._spec = spec
        policy = load_policy(spec.model, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code)
        self._policy = policy.to(spec.device).eval().requires_grad_(False)

    def logprobs(self, group: TrajectoryGroup) -> np.ndarray:
        """float32 [T] over the group's trajectories end to end, at spec.temperature."""
        import torch

        from rl_cluster.modeling.packed import PackedLayout
        from rl_cluster.modeling.sharing import shared_prompts

        lengths = [len(t.tokens) for t in group.trajectories]
        parts = []
        for rows in _passes(lengths, self._spec.tokens_per_pass):
            chosen = [group.trajectories[row] for row in rows]
            tokens = np.concatenate([t.tokens for t in chosen]).astype(np.int64)
            mask = np.concatenate([t.action_mask for t in chosen])
            sizes = [lengths[row] for row in rows]
            targets = np.flatnonzero(mask)
            result = np.zeros(len(tokens), dtype=np.float32)
            if len(targets) > 0:
                with torch.no_grad():
                    found, _, _ = self._policy(
                        torch.from_numpy(tokens).to(self._spec.device),
                        PackedLayout.of(sizes, self._spec.device, shared_prompts(tokens, sizes, mask)),
                        torch.from_numpy(targets).to(self._spec.device),
                        self._spec.temperature,
                    )
                result[targets] = found.float().cpu().numpy()
            parts.append(result)
        return np.concatenate(parts)

    def checksum(self) -> str:
        """SHA-256 over names and bytes of all parameters: stays the same over a run."""
        import hashlib

        import torch

        digest = hashlib.sha256()
        for name, parameter in self._policy.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def _passes(lengths: list[int], budget: int) -> list[list[int]]:
    """Rows in order, as many per pass as fit."""
    passes: list[list[int]] = []
    used = 0
    for row, length in enumerate(lengths):
        if not passes or used + length > budget:
            passes.append([])
            used = 0
        passes[-1].append(row)
        used += length
    return passes


class ReferenceActor:
    """Runs in its own process, one group at a time."""

    def __init__(self, spec: ReferenceSpec) -> None:
        self._spec = spec
        self._model: Any = None

    def start(self) -> int:
        """Load the model; returns the process id. Raises BadInputError when there is none."""
        self._model = ReferenceModel(self._spec)
        return os.getpid()

    def logprobs(self, group: TrajectoryGroup) -> tuple[None, np.ndarray]:
        """The None is what the driver waits for, so that the array need not travel to it."""
        return None, self._model.logprobs(group)

    def checksum(self) -> str:
        return self._model.checksum()


class ReferenceHandle:
    """Implements protocols.Reference on the driver's side; groups are answered in order."""

    def __init__(self, name: str, actor: Any, deadline_seconds: float) -> None:
        self.name = name
        self._actor = actor
        self._deadline_seconds = deadline_seconds

    async def start(self) -> int:
        """The caller waits for it under a deadline of its own."""
        return await answer(self.name, self._actor.start.remote())

    async def logprobs(self, group: Ref) -> Ref:
        done, result = self._actor.logprobs.options(num_returns=2).remote(group)
        doing = "a group's reference log-probabilities"
        await answer(self.name, done, doing, self._deadline_seconds)
        return result

    async def checksum(self) -> str:
        return await answer(self.name, self._actor.checksum.remote(), "its checksum", CONTROL_SECONDS)

    def close(self) -> None:
        ray.kill(self._actor)


def create_reference_worker(
    name: str, spec: ReferenceSpec, options: Mapping[str, Any] | None = None
) -> ReferenceHandle:
    """Place the actor; `start` it afterwards. options: for Ray."""
    settings: dict[str, Any] = {
        "num_cpus": spec.num_threads,
        "num_gpus": 1 if spec.device == "cuda" else 0,
        "runtime_env": {"env_vars": spec.environment},
    }
    actor = ray.remote(ReferenceActor).options(**settings | dict(options or {})).remote(spec)
    return ReferenceHandle(name, actor, spec.deadline_seconds)
