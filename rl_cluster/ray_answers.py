"""Waiting for a Ray worker: an ObjectRef in, its value or a typed error that names the worker out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rl_cluster.errors import DeadlineError, RLClusterError, WorkerDiedError

CONTROL_SECONDS = 600.0
"""For requests that take milliseconds to a minute: signs of life, memory moves, closing down."""
LAST_LINES = 5
"""How much of a dead worker's standard error goes into its WorkerDiedError."""


async def answer(
    worker: str, ref: Awaitable[Any], doing: str = "answering", seconds: float | None = None
) -> Any:
    """The value of `ref`. seconds None: the caller waits for several workers, under a deadline of its own.

    Raises the worker's own error where it is one of ours, WorkerDiedError when the worker is gone,
    DeadlineError when it takes longer than `seconds`; all of them name the worker.
    """
    try:
        async with asyncio.timeout(seconds):
            return await ref
    except RayActorError as error:
        raise WorkerDiedError(worker, f"{error}{last_words(str(error))}") from error
    except RayTaskError as error:
        if isinstance(error.cause, RLClusterError):
            raise error.cause from error
        raise
    except RayError as error:
        raise WorkerDiedError(worker, f"{type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise DeadlineError(f"{worker} was not done with {doing} within {seconds:g} s") from error


def last_words(death: str) -> str:
    """The last lines that the process which Ray's message names wrote to its standard error, where its log
    is on this node; else nothing."""
    found = re.search(r"\bpid[:=]\s*(\d+)", death)
    node = ray._private.worker.global_worker.node
    if found is None or node is None:
        return ""
    logs = sorted(Path(node.get_logs_dir_path()).glob(f"worker-*-{found[1]}.err"))
    if not logs:
        return ""
    lines = [line for line in logs[-1].read_text(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith((":job_id:", ":actor_name:"))]
    return "\nits last words:\n  " + "\n  ".join(lines[-LAST_LINES:]) if lines else ""
