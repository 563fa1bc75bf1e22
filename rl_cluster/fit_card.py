"""The README.md of a model that was trained on fixed data: a FitConfig and metrics in, Markdown out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_cluster import __version__
from rl_cluster.config.fit import FitConfig, RewardObjective
from rl_cluster.config.load import dump_config
from rl_cluster.model_card import as_given, results_table
from rl_cluster.run_folder import RunFolder, write_atomically

SHOWN = ("train/loss", "train/accuracy", "train/margin", "eval/loss", "eval/accuracy", "eval/margin")


def write_fit_card(config: FitConfig, folder: RunFolder) -> Path:
    """README.md in the run's model folder, from its config and metrics.jsonl."""
    card = folder.model / "README.md"
    write_atomically(card, as_given(fit_card(config, folder.read_metrics())))
    return card


def fit_card(config: FitConfig, rows: Sequence[Mapping[str, Any]]) -> str:
    """Data, settings, results and how to load the model."""
    start = config.model.path or "a char-level Qwen2 made for the run (`model.scratch`)"
    steps = max((int(row["step"]) for row in rows), default=0)
    data = config.data.path or "rows handed over by the calling program"
    parts = [
        _header(config),
        f"# {config.run.name}\n",
        f"{start} trained with {config.objective.name.upper()} by rl-cluster {__version__}: {steps} steps of "
        f"{config.batch.rows_per_step} examples.\n",
        "## Result\n",
        results_table(rows, SHOWN),
        "## Use\n",
        _usage(config),
        f"## Data\n\n{data} ({config.data.source}).\n",
        "## Settings\n",
        f"<details><summary>The whole configuration</summary>\n\n```yaml\n{dump_config(config)}```\n",
        "</details>\n",
    ]
    return "\n".join(parts)


def _is_reward(config: FitConfig) -> bool:
    return isinstance(config.objective, RewardObjective)


def _header(config: FitConfig) -> str:
    adapter = config.model.lora is not None and not _is_reward(config)
    values: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    if config.model.path is not None:
        values["base_model"] = config.model.path
    values["pipeline_tag"] = "text-classification" if _is_reward(config) else "text-generation"
    values["tags"] = ["rl-cluster", config.objective.name]
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def _usage(config: FitConfig) -> str:
    if _is_reward(config):
        factory = "transformers import AutoModelForSequenceClassification"
    elif config.model.lora is not None:
        factory = "peft import AutoPeftModelForCausalLM"
    else:
        factory = "transformers import AutoModelForCausalLM"
    name = factory.split()[-1]
    return f'```python\nfrom {factory}\n\nmodel = {name}.from_pretrained("path/to/this/folder")\n```\n'
