"""The workers of a run, on Ray (assembly/workers.py) or in this process (assembly/local.py), as one thing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rl_cluster.loop.loop import Workers

if TYPE_CHECKING:
    from learners.group import LearnerGroup


class Samplers(Protocol):
    """Rollout workers and scorers."""

    async def close(self) -> None: ...


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class Cluster:
    """Everything that `workers` stands on."""

    workers: Workers
    samplers: Samplers
    learner: LearnerGroup
    critic: LearnerGroup | None
    reference: Closable | None

    async def load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint's learner states."""
        await self.learner.load(checkpoint / "learner")
        if self.critic is not None:
            await self.critic.load(checkpoint / "critic")

    async def close(self) -> None:
        """End every worker; nothing stays behind."""
        await self.samplers.close()
        for worker in (self.learner, self.critic, self.reference):
            if worker is not None:
                worker.close()
