"""The README.md of a trained model: a config and metrics in, Markdown with the Hub's header out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from rl_cluster import __version__
from rl_cluster.config.data import DataConfig, FileSource
from rl_cluster.config.fit import FitConfig, RewardObjective
from rl_cluster.config.reading.load import dump_config
from rl_cluster.config.reward import scorer_name
from rl_cluster.config.run import ModelConfig, RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.files.atomic import write_atomically
from rl_cluster.metrics.curve import plot_runs
from rl_cluster.metrics.names import describe
from rl_cluster.run_folder.folder import RunFolder

CURVES = "curves.png"
SHOWN = (
    "eval/score_mean",
    "eval/accuracy",
    "objective/scores",
    "objective/kl",
    "policy/entropy_avg",
    "completions/mean_length",
)
SHOWN_OF_FITS = ("train/loss", "train/accuracy", "train/margin", "eval/loss", "eval/accuracy", "eval/margin")

Rows = Sequence[Mapping[str, Any]]


def write_model_card(config: RunConfig, folder: RunFolder) -> Path:
    """README.md and curves.png in the run's model folder, from its config and metrics.jsonl."""
    try:
        plot_runs([folder], folder.model / CURVES, title=config.run.name)
        curves = True
    except BadInputError:  # a run without evaluation that stopped before its first step has no curve
        curves = False
    return _write(folder.model, model_card(config, folder.read_metrics(), curves))


def write_fit_card(config: FitConfig, folder: RunFolder) -> Path:
    """README.md in the fit's model folder, from its config and metrics.jsonl."""
    return _write(folder.model, fit_card(config, folder.read_metrics()))


def write_trainer_card(
    config: RunConfig,
    folder: Path,
    rows: Rows,
    model_name: str | None,
    dataset_name: str | None,
    tags: str | Sequence[str] | None,
) -> Path:
    """folder/README.md with the user's own names; also before any training."""
    folder.mkdir(parents=True, exist_ok=True)
    datasets = None if dataset_name is None else [dataset_name]
    more = [tags] if isinstance(tags, str) else list(tags or [])
    return _write(
        folder, model_card(config, rows, curves=False, name=model_name, datasets=datasets, tags=more)
    )


def _write(folder: Path, text: str) -> Path:
    """Configurations hold absolute paths; a card is for others, who have no such folder."""
    card = folder / "README.md"
    write_atomically(card, text.replace(f"{Path.cwd()}{os.sep}", ""))
    return card


def model_card(
    config: RunConfig,
    rows: Rows,
    curves: bool,
    name: str | None = None,
    datasets: list[str] | None = None,
    tags: Sequence[str] = (),
) -> str:
    """Data, settings, results and how to load the model of a run."""
    header = ModelCardData(
        library_name=_library(config.model),
        base_model=config.model.path,
        pipeline_tag="text-generation",
        tags=["rl-cluster", config.algorithm.name, "reinforcement-learning", *tags],
        datasets=datasets,
        model_name=name,
    )
    batch = config.batch
    work = (
        f"steps of {batch.prompts_per_step * batch.samples_per_prompt} responses "
        f"({batch.prompts_per_step} prompts × {batch.samples_per_prompt})"
    )
    body = [
        f"![curves of the run]({CURVES})\n" if curves else "",
        f"## Use\n\n{_usage(config.model)}",
        "## Data and rewards\n",
        _data(config.data),
        _rewards(config),
    ]
    return _card(config, header, name, work, results_table(rows, SHOWN), rows, body)


def fit_card(config: FitConfig, rows: Rows) -> str:
    """Data, settings, results and how to load the model of a fit."""
    reward = isinstance(config.objective, RewardObjective)
    header = ModelCardData(
        library_name="transformers" if reward else _library(config.model),
        base_model=config.model.path,
        pipeline_tag="text-classification" if reward else "text-generation",
        tags=["rl-cluster", config.objective.name],
    )
    data = config.data.path or "rows handed over by the calling program"
    body = [
        f"## Use\n\n{_usage(config.model, reward)}",
        f"## Data\n\n{data} ({config.data.source}).\n",
    ]
    work = f"steps of {config.batch.rows_per_step} examples"
    return _card(config, header, None, work, results_table(rows, SHOWN_OF_FITS), rows, body)


def _card(
    config: RunConfig | FitConfig,
    header: ModelCardData,
    name: str | None,
    work: str,
    results: str,
    rows: Rows,
    body: Sequence[str],
) -> str:
    """name None: the run's. work: what a step is."""
    trained_by = config.algorithm.name if isinstance(config, RunConfig) else config.objective.name
    start = config.model.path or "a char-level Qwen2 made for the run (`model.scratch`)"
    steps = max((int(row["step"]) for row in rows), default=0)
    parts = [
        f"---\n{header.to_yaml()}\n---\n",
        f"# {name or config.run.name}\n",
        f"{start} trained with {trained_by.upper()} by rl-cluster {__version__}: {steps} {work}.\n",
        f"## Result\n\n{results}",
        *body,
        f"## Settings\n\n<details><summary>The whole configuration</summary>\n\n"
        f"```yaml\n{dump_config(config)}```\n\n</details>\n",
    ]
    return "\n".join(part for part in parts if part)


def results_table(rows: Rows, names: Sequence[str]) -> str:
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


def _library(model: ModelConfig) -> str:
    return "transformers" if model.lora is None else "peft"


def _usage(model: ModelConfig, reward: bool = False) -> str:
    if reward:
        return _python("transformers", "AutoModelForSequenceClassification")
    if model.lora is not None:
        return "An adapter in peft's format:\n\n" + _python("peft", "AutoPeftModelForCausalLM")
    return _python("transformers", "AutoModelForCausalLM") + (
        "\nvLLM serves it as it is: `vllm serve path/to/this/folder`.\n"
    )


def _python(package: str, factory: str) -> str:
    folder = '"path/to/this/folder"'
    return (
        f"```python\nfrom transformers import AutoTokenizer\nfrom {package} import {factory}\n\n"
        f"model = {factory}.from_pretrained({folder})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({folder})\n```\n"
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
