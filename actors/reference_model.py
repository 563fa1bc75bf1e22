"""The frozen reference policy without Ray: trajectories in, log-probabilities of their tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_cluster.trajectory import Trajectory, TrajectoryGroup


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
    """Frozen; loaded by the process that uses it."""

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
        return self.logprobs_of(group.trajectories)

    def logprobs_of(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """float32 [T] over the trajectories end to end, 0 where not an action."""
        import torch

        from rl_cluster.modeling.layout import PackedLayout
        from rl_cluster.modeling.sharing import shared_prefixes

        lengths = [len(t.tokens) for t in trajectories]
        parts = []
        for rows in _passes(lengths, self._spec.tokens_per_pass):
            chosen = [trajectories[row] for row in rows]
            tokens = np.concatenate([t.tokens for t in chosen]).astype(np.int64)
            mask = np.concatenate([t.action_mask for t in chosen])
            sizes = [lengths[row] for row in rows]
            targets = np.flatnonzero(mask)
            result = np.zeros(len(tokens), dtype=np.float32)
            if len(targets) > 0:
                with torch.no_grad():
                    found, _, _ = self._policy(
                        torch.from_numpy(tokens).to(self._spec.device),
                        PackedLayout.of(sizes, self._spec.device, shared_prefixes(tokens, sizes)),
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
