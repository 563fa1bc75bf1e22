"""`from rl_cluster import …` finds every public name, and importing the package stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rl_cluster


@pytest.mark.parametrize("name", rl_cluster.__all__)
def test_every_public_name_resolves_to_itself(name: str) -> None:
    value = getattr(rl_cluster, name)
    assert getattr(value, "__name__", name) == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PPOTrainerr'"):
        _ = rl_cluster.PPOTrainerr


def test_listing_the_names_imports_nothing_heavy() -> None:
    program = (
        "import sys, rl_cluster; dir(rl_cluster);"
        "print(sorted({'torch', 'vllm', 'deepspeed', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
