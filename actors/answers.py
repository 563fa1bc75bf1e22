"""Waiting for a Ray worker: an ObjectRef in, its value or a typed error that names the worker out."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from rl_cluster.errors import RLClusterError, WorkerDiedError


async def answer(worker: str, ref: Awaitable[Any]) -> Any:
    """Raises the worker's own error where it is one of ours, WorkerDiedError when the worker is gone."""
    try:
        return await ref
    except RayActorError as error:
        raise WorkerDiedError(worker, str(error)) from error
    except RayTaskError as error:
        if isinstance(error.cause, RLClusterError):
            raise error.cause from error
        raise
    except RayError as error:
        raise WorkerDiedError(worker, f"{type(error).__name__}: {error}") from error
