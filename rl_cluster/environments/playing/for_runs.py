"""An environment in; what a run makes of it out: rows of prompts, and a factory of environments or a scorer.

Two kinds: one that plays (reset, step) becomes rows and a factory, its rewards reach the run through the
scorer of kind `environment`; one with cases (build_dataset, score_episode) becomes rows and a scorer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.environments.playing.case_environment import CaseEnvironment, environment_tools, read_cases
from rl_cluster.environments.playing.reward_calls import finite_number
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.loading import load_function
from rl_cluster.rewards.trying import check_binds

Row = dict[str, Any]
"""prompt (text or chat messages), and columns that reach scorers and `start` as metadata."""

FIELD = "rollout.environment.function"

Factory = Callable[[Any], Any]
"""f(tokenizer) -> an environment that nobody else uses."""


def prompts_of(env: Any) -> list[Row]:
    """A row per prompt of a playing environment: prompt, prompt_idx.

    From env.prompts; of an environment without them, the one prompt that a reset shows (BadInputError if the
    next reset shows another: such an environment needs `prompts`, or `start` and rows of one's own).
    """
    prompts = getattr(env, "prompts", None)
    if prompts is None:
        prompts = [_only_prompt(env)]
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        raise BadInputError(
            f"{type(env).__name__}.prompts={prompts!r:.60}: must be a list of texts, not empty."
        )
    return [{"prompt": prompt, "prompt_idx": index} for index, prompt in enumerate(prompts)]


def _only_prompt(env: Any) -> str:
    shown = [getattr(env.reset(), "prompt", None) for _ in range(2)]
    if not isinstance(shown[0], str) or shown[0] != shown[1]:
        raise BadInputError(
            f"{type(env).__name__} has no prompts, and its resets show {shown[0]!r:.40}, {shown[1]!r:.40}: "
            "a run must know the prompts beforehand. Give it `prompts` and start(prompt, metadata, seed)."
        )
    return shown[0]


def environment_factory(given: Any) -> Factory:
    """given: a factory or class, called with the tokenizer; or an environment, of which copies are played.

    Copies share the tokenizer and the torch models of the original. BadInputError for anything else.
    """
    if all(callable(getattr(given, name, None)) for name in ("reset", "step")) and not isinstance(
        given, type
    ):
        return CopiesOf(given)
    if callable(given):
        factory: Factory = given
        return factory
    raise BadInputError(
        f"environment is {type(given).__name__} {given!r:.60}: an environment (reset, step), its class or a "
        "function f(tokenizer) -> environment is needed."
    )


@dataclass(frozen=True)
class CopiesOf:
    """A factory of copies."""

    original: Any

    def __call__(self, tokenizer: Any) -> Any:
        del tokenizer  # the original has its own
        shared = [v for v in vars(self.original).values() if isinstance(v, torch.nn.Module)]
        shared.append(getattr(self.original, "tokenizer", None))
        return copy.deepcopy(self.original, {id(value): value for value in shared})


@dataclass(frozen=True)
class ConfiguredFactory:
    """What rollout.environment.function names; travels as that name and is imported where it is called."""

    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def __call__(self, tokenizer: Any) -> Any:
        return partial(load_function(self.function, self.folder, FIELD), **self.options)(tokenizer)


def configured_factory(settings: EnvironmentConfig, given: Any = None) -> Factory:
    """The factory of a run: of its configuration, else what the caller has handed over.

    The function is imported here already, so that BadInputError comes before any worker starts; relative
    paths start from this process's folder, on every machine.
    """
    if settings.function is not None and given is not None:
        raise BadInputError(
            f"rollout.environment.function={settings.function!r}: an environment was handed over too."
        )
    if settings.function is not None:
        function = partial(load_function(settings.function, Path.cwd(), FIELD), **settings.options)
        check_binds(f"{FIELD}={settings.function!r}", function, 1, "f(tokenizer, **options)")
        return ConfiguredFactory(settings.function, settings.options, Path.cwd())
    if given is None:
        raise BadInputError(
            "rollout.environment.function is not set, and no environment was handed over. Name a function "
            "f(tokenizer) -> environment."
        )
    return environment_factory(given)


@dataclass(frozen=True)
class CaseRun:
    """rows: prompt, case_idx, and tools where the environment has any. score: a scorer of the main loop,
    f(prompts, responses, metadata) -> [score]."""

    rows: list[Row]
    score: Callable[[Sequence[str], Sequence[str], Sequence[Mapping[str, Any]]], list[float]]


def case_run(env: CaseEnvironment, tokenizer: Any, model: Any = None) -> CaseRun:
    """A GRPO environment as a data set and a scorer.

    A row's `tools` are JSON schemas, for the chat template. completion: the response's text, or, where the
    case's prompt is a chat, [{"role": "assistant", "content": text}]. model: handed to score_episode as it
    is; a run's policy lives in other processes, so runs give None, and an environment that needs a model
    brings its own. BadInputError as read_cases.
    """
    cases = read_cases(env, tokenizer)
    tools = tool_schemas(environment_tools(env))
    shared = {"tools": tools} if tools else {}
    rows = [{"prompt": case.prompt, "case_idx": case.case_idx} | shared for case in cases]
    chats = {case.case_idx for case in cases if not isinstance(case.prompt, str)}

    def score(
        prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        scores = []
        for prompt, response, row in zip(prompts, responses, metadata, strict=True):
            case = row["case_idx"]
            completion = [{"role": "assistant", "content": response}] if case in chats else response
            answer = env.score_episode(model, tokenizer, completion, case)
            scores.append(finite_number("score_episode returned", answer, prompt))
        return scores

    return CaseRun(rows, score)


def tool_schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Functions (typed, with a Google-style docstring) and JSON schemas as JSON schemas."""
    from transformers.utils import get_json_schema

    schemas = []
    for tool in tools:
        if not isinstance(tool, Mapping) and not callable(tool):
            raise BadInputError(f"get_tools returned {tool!r:.60}: functions or JSON schemas are needed.")
        try:
            schemas.append(dict(tool) if isinstance(tool, Mapping) else get_json_schema(tool))
        except Exception as error:  # transformers raises several kinds for a docstring that it cannot read
            raise BadInputError(f"get_tools: no schema can be made of {tool!r:.60}: {error}") from error
    return schemas
