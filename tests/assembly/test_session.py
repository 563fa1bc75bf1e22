"""A local Ray that is slow to start: tried again, then a typed error; with a stand-in for ray.init."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_cluster.assembly import session
from rl_cluster.errors import DeadlineError

PLAN: Any = SimpleNamespace(machine=SimpleNamespace(cores=2, gpus=0))


class SlowRay:
    """Times out as Ray does, `failures` times."""

    def __init__(self, failures: int, text: str = "The current node timed out during startup.") -> None:
        self.failures, self.text = failures, text
        self.calls: list[str] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, **settings: Any) -> None:
        assert settings["address"] == "local" and settings["num_cpus"] == 2
        self.calls.append("init")
        if self.calls.count("init") <= self.failures:
            raise Exception(self.text)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_ray_that_is_slow_to_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SlowRay(failures=2)
    monkeypatch.setattr(session, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with session.ray_session(PLAN):
        assert ray.calls == ["init", "shutdown", "init", "shutdown", "init"]
    assert ray.calls[-1] == "shutdown"


def test_after_the_last_attempt_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SlowRay(failures=9)
    monkeypatch.setattr(session, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(DeadlineError, match="3 times in a row"), session.ray_session(PLAN):
        pass
    assert ray.calls.count("init") == 3


def test_any_other_failure_of_ray_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SlowRay(failures=9, text="no space left")
    monkeypatch.setattr(session, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(Exception, match="no space left"), session.ray_session(PLAN):
        pass
    assert ray.calls == ["init"]
