"""Settings and model sizes that tests of several rooms start from."""

from __future__ import annotations

from typing import Any

from rl_cluster.config.run import ScratchModel

BASE: dict[str, Any] = {
    "model": {"scratch": {}},
    "data": {"train": {"source": "addition"}},
    "rewards": {"scorers": [{"kind": "exact_match"}]},
}
"""The least that makes a RunConfig."""

TINY = ScratchModel(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, max_positions=64)
"""A model that steps in milliseconds."""
