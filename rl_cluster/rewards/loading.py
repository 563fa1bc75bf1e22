"""A scorer's configuration in; its name and a function ready to be called out."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_cluster.config.reward import (
    COMMON_FIELDS,
    FunctionScorer,
    ReasoningGymScorer,
    ScorerConfig,
    scorer_name,
)
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.references import check_references
from rl_cluster.rewards.safe_text import error_text
from rl_cluster.trajectory import Prompt

ScoreFunction = Callable[..., Any]
"""f(prompts, responses, metadata) -> list[float | dict[str, float]], or a coroutine of one."""


def load_function(
    spec: str, folder: Path | None = None, field: str = "rewards.scorers.function"
) -> ScoreFunction:
    """The function that `package.module:function` or `path/file.py:function` names.

    folder: what a relative path starts from, and where modules are found besides Python's own path
    (default: the current folder). field: what errors name. BadInputError if it cannot be found, imported or
    called.
    """
    place, separator, name = spec.rpartition(":")
    if not (separator and place and name.isidentifier()):
        raise BadInputError(f"{field}={spec!r}: write package.module:function or path/to/file.py:function.")
    folder = folder or Path.cwd()
    module = (
        _load_file(folder / place, spec, field)
        if place.endswith(".py")
        else _load_module(place, spec, folder, field)
    )
    names = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
    function = vars(module).get(name)
    if not callable(function):
        found = "nothing" if function is None else f"a {type(function).__name__}"
        raise BadInputError(
            f"{field}={spec!r}: {name!r} in {place} is {found}, not a function. "
            f"There are: {', '.join(names) or 'none'}."
        )
    found_function: Callable[..., Any] = function
    return found_function


def _load_module(name: str, spec: str, folder: Path, field: str) -> ModuleType:
    # As `python -m` does: modules next to the user are importable, after everything installed.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _import_error(spec, field, error) from error


def _load_file(path: Path, spec: str, field: str) -> ModuleType:
    if not path.is_file():
        raise BadInputError(f"{field}={spec!r}: there is no file {path}. Correct the path.")
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    name = f"rl_cluster_user_{path.stem}_{digest}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None, "a .py file always has a loader"
    assert module_spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickles of the user's file look their module up by name.
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _import_error(spec, field, error) from error
    return module


def _import_error(spec: str, field: str, error: BaseException) -> BadInputError:
    """Also of what is no Exception: sys.exit() in a reward's file must not end the run with its exit code."""
    return BadInputError(
        f"{field}={spec!r}: importing it failed with {error_text(error)}. "
        "Correct the import path, or the module."
    )


def make_function(config: ScorerConfig, folder: Path | None = None) -> ScoreFunction:
    """The Python function of a scorer, its options bound; not for reward models. folder: as load_function."""
    if isinstance(config, FunctionScorer):
        return partial(load_function(config.function, folder), **config.options)
    assert config.built_in is not None, f"{config.kind} has no function of its own"
    module, _, name = config.built_in.partition(":")
    return partial(vars(importlib.import_module(module))[name], **own_fields(config))


def own_fields(config: ScorerConfig) -> dict[str, Any]:
    """What this kind of scorer has beside the fields of all: the options of its function."""
    return config.model_dump(exclude={"kind", *COMMON_FIELDS})


def scorer_names(configs: Sequence[ScorerConfig]) -> tuple[str, ...]:
    """The name of each scorer, as in rewards/NAME; BadInputError if two are the same."""
    names = tuple(scorer_name(config) for config in configs)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise BadInputError(
            f"rewards.scorers: {len(names)} scorers, more than one is called {twice[0]!r}. "
            "Give each a name of its own."
        )
    return names


def check_metadata(configs: Sequence[ScorerConfig], prompts: Sequence[Prompt]) -> None:
    """BadInputError, before anything starts, if a function cannot be had, or a prompt lacks what a built-in
    scorer compares with, or has something there that no response could equal."""
    for config in configs:
        if isinstance(config, FunctionScorer):
            load_function(config.function)
        for prompt in prompts:
            missing = [key for key in config.needed_columns if prompt.metadata.get(key) is None]
            if missing:
                raise BadInputError(
                    f"rewards.scorers ({config.kind}): {prompt.prompt_id} has no {missing[0]!r} to score "
                    f"against. It has: {', '.join(prompt.metadata) or 'no other columns'}. {_remedy(config)}"
                )
    check_references(configs, prompts)


def _remedy(config: ScorerConfig) -> str:
    if isinstance(config, ReasoningGymScorer):
        return "This scorer goes with data.train.source=reasoning_gym."
    return "Set answer_key to the column with the right answer."
