"""Where a run works out when nobody says so: small models here, others and named clusters on Ray."""

import pytest

from rl_cluster.config.planning.backend import LOCAL_LIMIT, choose_backend


@pytest.mark.parametrize(
    ("asked", "size", "address", "expected"),
    [
        ("auto", LOCAL_LIMIT, None, "local"),
        ("auto", LOCAL_LIMIT + 1, None, "ray"),
        ("auto", None, None, "ray"),
        ("auto", 1, "127.0.0.1:6379", "ray"),
        ("local", None, "127.0.0.1:6379", "local"),
        ("ray", 1, None, "ray"),
    ],
)
def test_the_size_decides_unless_a_cluster_or_the_user_does(monkeypatch, asked, size, address, expected):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert choose_backend(asked, size) == expected
