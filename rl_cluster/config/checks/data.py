"""Checks of data, rewards and evaluation: do the files exist, do the parts belong together."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rl_cluster.config.checks.model import folder_problems
from rl_cluster.config.data import FileSource, ReasoningGymSource
from rl_cluster.config.planning.machine import Machine
from rl_cluster.config.reading.problems import Problem
from rl_cluster.config.reward import FunctionScorer, ReasoningGymScorer, RewardModelScorer, scorer_name
from rl_cluster.config.run import RunConfig


def data_files_exist(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    source = config.data.train
    if not isinstance(source, FileSource):
        return
    given = {"data.train.path": source.path, "data.train.eval_path": source.eval_path}
    for field, path in given.items():
        if path is None:
            continue
        place = Path(path).expanduser()
        if not place.exists():
            yield Problem(field, path, "there is no such file or folder", "Give the path of the prompts.")
        elif source.source == "dataset" and not place.is_dir():
            remedy = "Give the folder written by save_to_disk, or set data.train.source to jsonl or parquet."
            yield Problem(field, path, "is a file, and data.train.source = dataset wants a folder", remedy)
        elif source.source != "dataset" and place.is_dir():
            remedy = "Give the file, or set data.train.source to dataset."
            yield Problem(
                field, path, f"is a folder, and data.train.source = {source.source} wants a file", remedy
            )


def packages_are_installed(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if isinstance(config.data.train, ReasoningGymSource) and not _installed("reasoning_gym"):
        remedy = "Run `pip install reasoning-gym`."
        yield Problem("data.train.source", "reasoning_gym", "the package is not installed", remedy)
    if config.log.wandb_project is not None and not _installed("wandb"):
        remedy = "Run `pip install wandb`, or remove log.wandb_project."
        yield Problem("log.wandb_project", config.log.wandb_project, "wandb is not installed", remedy)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def scorers_are_sound(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    for i, scorer in enumerate(config.rewards.scorers):
        field = f"rewards.scorers.{i}"
        if isinstance(scorer, FunctionScorer):
            yield from function_problems(f"{field}.function", scorer.function)
        if isinstance(scorer, RewardModelScorer):
            yield from folder_problems(f"{field}.path", scorer.path)
        if isinstance(scorer, ReasoningGymScorer) and not isinstance(config.data.train, ReasoningGymSource):
            reason = f"scores reasoning-gym tasks, and data.train.source = {config.data.train.source}"
            yield Problem(f"{field}.kind", scorer.kind, reason, "Use exact_match, math or a function.")


def function_problems(field: str, function: str) -> Iterator[Problem]:
    """Whether an import path can be one."""
    remedy = "Write package.module:function or path/to/file.py:function."
    module, colon, name = function.rpartition(":")
    if not colon or not name.isidentifier() or not module:
        yield Problem(field, function, "is not an import path", remedy)
    elif module.endswith(".py") and not Path(module).expanduser().is_file():
        yield Problem(field, function, f"there is no file {module}", remedy)


def scorer_names_differ(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    names = [scorer_name(scorer) for scorer in config.rewards.scorers]
    for name, count in Counter(names).items():
        if count > 1:
            field = f"rewards.scorers.{len(names) - 1 - names[::-1].index(name)}.name"
            reason = f"{count} scorers have this name, and rewards/{name} could show only one"
            yield Problem(field, name, reason, "Give each scorer a name of its own.")
    if all(scorer.weight == 0 for scorer in config.rewards.scorers):
        yield Problem("rewards.scorers.0.weight", 0, "every scorer has weight 0", "Give one a weight.")


def shaping_fits(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    shaping, limit = config.rewards.shaping, config.rollout.max_new_tokens
    if shaping.overlong_buffer > limit:
        reason = f"is longer than rollout.max_new_tokens = {limit}"
        field = "rewards.shaping.overlong_buffer"
        yield Problem(field, shaping.overlong_buffer, reason, f"Give at most {limit}.")


def evaluation_fits(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    evaluation, held_out = config.eval, config.data.held_out
    source = config.data.train
    own_file = isinstance(source, FileSource) and source.eval_path is not None
    if evaluation.every and not held_out and not own_file:
        yield Problem("eval.every", evaluation.every, "data.held_out = 0 leaves no prompts", "Hold some out.")
    if held_out and not own_file and evaluation.num_prompts > held_out:
        remedy = f"Give at most {held_out}, or raise data.held_out."
        reason = f"is more than data.held_out = {held_out}"
        yield Problem("eval.num_prompts", evaluation.num_prompts, reason, remedy)
    samples = evaluation.samples_per_prompt
    for i, k in enumerate(evaluation.pass_at):
        if k < 1 or k > samples:
            reason = f"needs 1 ≤ k ≤ eval.samples_per_prompt = {samples}"
            yield Problem(f"eval.pass_at.{i}", k, reason, "Raise samples_per_prompt or lower k.")
    if samples > 1 and evaluation.temperature == 0:
        reason = "greedy samples of a prompt are all the same"
        remedy = "Set eval.temperature above 0, or 1 sample."
        yield Problem("eval.samples_per_prompt", samples, reason, remedy)


DATA_CHECKS = (
    data_files_exist,
    packages_are_installed,
    scorers_are_sound,
    scorer_names_differ,
    shaping_fits,
    evaluation_fits,
)
