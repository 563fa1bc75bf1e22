"""The Ray cluster that a run uses: the one of RAY_ADDRESS, or a local one that lives as long as the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rl_cluster.config.fit_plan import FitPlan
from rl_cluster.config.plan import Plan
from rl_cluster.errors import BadInputError


@contextmanager
def ray_session(plan: Plan | FitPlan) -> Iterator[None]:
    """Inside, Ray is up. A local one gets the plan's cores and GPUs; a cluster of RAY_ADDRESS has its own.

    A Ray that the caller has already started is used and left as it is. Raises BadInputError when
    RAY_ADDRESS leads nowhere.
    """
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
    try:
        if address:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        else:
            ray.init(address="local", num_cpus=plan.machine.cores, num_gpus=plan.machine.gpus, **quiet)
    except ConnectionError as error:
        raise BadInputError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}). Start one with "
            "`ray start --head`, or unset RAY_ADDRESS to use a local Ray."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
