"""The Ray cluster that a run uses: the one of RAY_ADDRESS, or a local one that lives as long as the run."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rl_cluster.config.planning.fit_plan import FitPlan
from rl_cluster.config.planning.plan import Plan
from rl_cluster.errors import BadInputError, DeadlineError

CONNECT_SECONDS = 60.0
START_ATTEMPTS = 3
"""Ray gives its node 30 s to come up, and no setting changes that; a busy machine may take longer."""


@contextmanager
def ray_session(plan: Plan | FitPlan) -> Iterator[None]:
    """Inside, Ray is up. A local one gets the plan's cores and GPUs; a cluster of RAY_ADDRESS has its own.

    A Ray that the caller has already started is used and left as it is. Raises BadInputError when
    RAY_ADDRESS leads nowhere, DeadlineError when a local Ray does not come up.
    """
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _connect(address)
    else:
        _start(plan)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    """In a thread, because Ray waits for minutes where another program has the port and says nothing."""
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def connect() -> None:
        try:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        except BaseException as error:  # noqa: BLE001 — raised again where it is waited for
            outcome.put(error)
        else:
            outcome.put(None)

    # Outside of the main thread Ray cannot do this, and warns.
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(number))
    threading.Thread(target=connect, name="ray-connect", daemon=True).start()
    try:
        error = outcome.get(timeout=CONNECT_SECONDS)
    except queue.Empty:
        error = ConnectionError(f"the port is open, but nothing like Ray in {CONNECT_SECONDS:g} s")
    if isinstance(error, ConnectionError):
        raise BadInputError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}). Start one with "
            "`ray start --head`, or unset RAY_ADDRESS to use a local Ray."
        ) from error
    if error is not None:
        raise error


def _start(plan: Plan | FitPlan) -> None:
    settings = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(address="local", num_cpus=plan.machine.cores, num_gpus=plan.machine.gpus, **settings)
            return
        except Exception as error:
            # Ray raises a plain Exception here; its text is the only mark.
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise DeadlineError(
                    f"a local Ray did not start within 30 s, {START_ATTEMPTS} times in a row. The machine is "
                    "busy with something else; wait, or start Ray yourself (`ray start --head`) and set "
                    "RAY_ADDRESS=auto."
                ) from error
