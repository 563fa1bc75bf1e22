"""A wish and a model's size in, where the run works out: this process or Ray."""

from __future__ import annotations

import os
from typing import Literal

LOCAL_LIMIT = 20_000_000
"""Parameters up to which a model is trained in this process unless a cluster is named."""

BackendChoice = Literal["auto", "local", "ray"]


def choose_backend(asked: BackendChoice, num_parameters: int | None) -> Literal["local", "ray"]:
    """auto: a small model stays in this process, unless RAY_ADDRESS names a cluster. None: size unknown."""
    if asked != "auto":
        return asked
    small = num_parameters is not None and num_parameters <= LOCAL_LIMIT
    return "local" if small and not os.environ.get("RAY_ADDRESS") else "ray"
