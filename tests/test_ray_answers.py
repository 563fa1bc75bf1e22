"""Waiting for a Ray worker: its value, its own error, its death and last words, or a deadline; by name."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest
import ray

from rl_cluster.errors import BadInputError, DeadlineError, WorkerDiedError
from rl_cluster.ray_answers import answer, last_words

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("ray_session")]


class Worker:
    def add(self, a: int, b: int) -> int:
        return a + b

    def refuse(self) -> None:
        raise BadInputError("model.path: is empty")

    def stumble(self) -> None:
        raise TimeoutError("of the worker's own")

    def wait(self) -> None:
        threading.Event().wait()

    def die(self) -> None:
        print("\n".join(f"line {number}" for number in range(20)), file=sys.stderr, flush=True)
        os._exit(3)


async def test_a_worker_is_named_in_whatever_goes_wrong() -> None:
    worker: Any = ray.remote(Worker).options(num_cpus=0, max_concurrency=2).remote()
    assert await answer("w-0", worker.add.remote(2, 3), "adding", 60.0) == 5
    with pytest.raises(BadInputError, match=r"^model\.path: is empty$"):
        await answer("w-0", worker.refuse.remote(), "refusing", 60.0)
    with pytest.raises(TimeoutError, match="of the worker's own") as caught:
        await answer("w-0", worker.stumble.remote(), "stumbling", 60.0)
    assert not isinstance(caught.value, DeadlineError), "the worker's TimeoutError is not ours"
    with pytest.raises(DeadlineError, match=r"^w-0 was not done with waiting within 0\.1 s$"):
        await answer("w-0", worker.wait.remote(), "waiting", 0.1)
    with pytest.raises(WorkerDiedError, match=r"^w-0: ") as died:
        await answer("w-0", worker.die.remote())
    lines = [f"  line {number}" for number in range(15, 20)]
    assert str(died.value).endswith("\n".join(["its last words:", *lines]))


def test_a_death_without_a_log_on_this_node_has_no_last_words() -> None:
    assert last_words("The actor died\n\tpid: 999999999\n") == ""
    assert last_words("The node was lost") == ""
