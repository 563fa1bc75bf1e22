"""The README.md of an exported model: a run's config and metrics in, Markdown with the Hub's header out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_cluster import __version__
from rl_cluster.config.data import DataConfig, FileSource
from rl_cluster.config.load import dump_config
from rl_cluster.config.reward import scorer_name
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.metrics.curve import plot_runs
from rl_cluster.metrics.names import describe
from rl_cluster.run_folder import RunFolder, write_atomically

CURVES = "curves.png"
SHOWN = (
    "eval/score_mean",
    "eval/accuracy",
    "objective/scores",
    "objective/kl",
    "policy/entropy_avg",
    "completions/mean_length",
)


def write_model_card(config: RunConfig, folder: RunFolder) -> Path:
    """README.md and curves.png in the run's model folder, from its config and metrics.jsonl."""
    rows = folder.read_metrics()
    try:
        plot_runs([folder], folder.model / CURVES, title=config.run.name)
        curves = True
    except BadInputError:  # a run without evaluation that stopped before its first step has no curve
        curves = False
    card = folder.model / "README.md"
    write_atomically(card, as_given(model_card(config, rows, curves)))
    return card


def as_given(text: str) -> str:
    """Configurations hold absolute paths; a card is for others, who have no such folder."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")


def model_card(config: RunConfig, rows: Sequence[Mapping[str, Any]], curves: bool) -> str:
    """Data, settings, results and how to load the model."""
    algorithm = config.algorithm.name.upper()
    start = config.model.path or "a char-level Qwen2 made for the run (`model.scratch`)"
    steps = max((int(row["step"]) for row in rows), default=0)
    sequences = config.batch.prompts_per_step * config.batch.samples_per_prompt
    parts = [
        _header(config),
        f"# {config.run.name}\n",
        f"{start} trained with {algorithm} by rl-cluster {__version__}: {steps} steps of {sequences} "
        f"responses ({config.batch.prompts_per_step} prompts × {config.batch.samples_per_prompt}).\n",
        "## Result\n",
        results_table(rows, SHOWN),
        f"![curves of the run]({CURVES})\n" if curves else "",
        "## Use\n",
        _usage(config),
        "## Data and rewards\n",
        _data(config.data),
        _rewards(config),
        "## Settings\n",
        "<details><summary>The whole configuration</summary>\n",
        f"```yaml\n{dump_config(config)}```\n",
        "</details>\n",
    ]
    return "\n".join(part for part in parts if part)


def _header(config: RunConfig) -> str:
    """The Hub's YAML front matter."""
    values: dict[str, Any] = {"library_name": "transformers" if config.model.lora is None else "peft"}
    if config.model.path is not None:
        values["base_model"] = config.model.path
    values["pipeline_tag"] = "text-generation"
    values["tags"] = ["rl-cluster", config.algorithm.name, "reinforcement-learning"]
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def results_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """First and last value of the named metrics; an empty run says so."""
    lines = ["| metric | first | last | |", "|---|---:|---:|---|"]
    for name in names:
        values = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if values:
            entry = describe(name)
            (first_step, first), (last_step, last) = values[0], values[-1]
            meaning = entry.meaning if entry else ""
            lines.append(
                f"| `{name}` | {first:.4g} (step {first_step}) | {last:.4g} (step {last_step}) | {meaning} |"
            )
    return "\n".join(lines) + "\n" if len(lines) > 2 else "No step was completed.\n"


def _usage(config: RunConfig) -> str:
    if config.model.lora is not None:
        return (
            "An adapter in peft's format:\n\n```python\nfrom peft import AutoPeftModelForCausalLM\n\n"
            'model = AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")\n```\n'
        )
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n```\n\n'
        "vLLM serves it as it is: `vllm serve path/to/this/folder`.\n"
    )


def _data(data: DataConfig) -> str:
    source = data.train
    what = source.path if isinstance(source, FileSource) else source.model_dump(exclude={"source"})
    return f"Prompts: `{source.source}`, {what}; {data.held_out} held out for evaluation.\n"


def _rewards(config: RunConfig) -> str:
    listed = ", ".join(f"`{scorer_name(s)}` (weight {s.weight:g})" for s in config.rewards.scorers)
    kl = config.algorithm.kl
    reference = f"KL {kl.estimator} × {kl.coef:g} in the {kl.place}" if kl.coef else "no KL term"
    return f"Rewards: {listed}; {reference}.\n"
