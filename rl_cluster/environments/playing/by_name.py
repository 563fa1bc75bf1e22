"""What a command line says about an environment in; the functions that a recipe names by import path out.

`score_cases` is a scorer (rewards.scorers, kind function), `make_environment` a rollout.environment.function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from rl_cluster.config.data import FileSource
from rl_cluster.data.readers import read_file
from rl_cluster.environments.playing.case_environment import load_case_environment
from rl_cluster.environments.playing.episode import RLEnvironment
from rl_cluster.environments.playing.for_runs import case_run
from rl_cluster.environments.playing.from_config import create_rl_environment
from rl_cluster.errors import BadInputError

Score = Callable[[Sequence[str], Sequence[str], Sequence[Mapping[str, Any]]], list[float]]


def score_cases(
    prompts: Sequence[str],
    responses: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    module: str,
    class_name: str,
    tokenizer: str,
) -> list[float]:
    """score_episode of a GRPO environment, made once per process. tokenizer: its path or hub name."""
    return _case_scorer(module, class_name, tokenizer)(prompts, responses, metadata)


@lru_cache(maxsize=8)
def _case_scorer(module: str, class_name: str, tokenizer: str) -> Score:
    from transformers import AutoTokenizer

    environment = load_case_environment(module, class_name)
    return case_run(environment, AutoTokenizer.from_pretrained(tokenizer)).score


def make_environment(
    tokenizer: Any, *, settings: Mapping[str, Any], source: str, path: str, prompt_column: str = "prompt"
) -> RLEnvironment:
    """create_rl_environment with the prompts of a file. settings: rl_env_type, rl_env_config, …"""
    prompts = _prompts(source, path, prompt_column)
    environment = create_rl_environment(SimpleNamespace(**settings), tokenizer, prompts)
    if environment is None:
        raise BadInputError(f"rl_env_type is not among the settings {dict(settings)}.")
    return environment


@lru_cache(maxsize=8)
def _prompts(source: Any, path: str, prompt_column: str) -> tuple[str, ...]:
    rows = read_file(
        FileSource(source=source, path=path, prompt_column=prompt_column), path, "data.train.path"
    )
    return tuple(row.prompt for row in rows.rows)
