"""Fixtures that several test folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for the whole test session, with Ray's default token authentication, ended afterwards."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(num_cpus=2, include_dashboard=False, address="local", log_to_driver=False)
    yield
    ray.shutdown()
