"""A trainer's run in; the README.md of create_model_card, with the user's name, data set and tags, out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_cluster.config.run import RunConfig
from rl_cluster.model_card import model_card


def trainer_card(
    config: RunConfig,
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    model_name: str | None,
    dataset_name: str | None,
    tags: str | Sequence[str] | None,
) -> Path:
    """folder/README.md; also before any training."""
    _, header, body = model_card(config, rows, curves=False).split("---\n", 2)
    values = yaml.safe_load(header)
    values["tags"] = [*values["tags"], *([tags] if isinstance(tags, str) else tags or [])]
    if dataset_name is not None:
        values["datasets"] = [dataset_name]
    if model_name is not None:
        values["model_name"] = model_name
        body = body.replace(f"# {config.run.name}", f"# {model_name}", 1)
    folder.mkdir(parents=True, exist_ok=True)
    card = folder / "README.md"
    card.write_text(f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n{body}")
    return card
