"""The protocol of GRPO environments (cases with a prompt each, a score per finished episode), checked."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rl_cluster.environments.playing.reward_calls import finite_number
from rl_cluster.errors import BadInputError


@runtime_checkable
class CaseEnvironment(Protocol):
    """An environment of GRPO: rows to train on, and a score for a completion of row `case_idx`.

    It may also have get_tools() -> list of functions or JSON schemas that the chat template is told of.
    """

    def build_dataset(self, tokenizer: Any) -> Any:
        """A datasets.Dataset, or a list of dicts, with the columns prompt and case_idx."""
        ...

    def score_episode(self, model: Any, tokenizer: Any, completion: Any, case_idx: int) -> float:
        """The score of a finished episode. completion: text, or chat messages where the prompt is a chat."""
        ...


@dataclass(frozen=True)
class CaseSettings:
    """The defaults of GRPO training with an environment, as on the command line."""

    rl_num_generations: int = 4
    rl_kl_coef: float = 0.1
    rl_clip_range: float = 0.2
    rl_loss_type: str = "grpo"
    rl_temperature: float = 1.0
    rl_top_k: int = 50
    rl_max_new_tokens: int = 128


def load_case_environment(module: str, class_name: str, **arguments: Any) -> CaseEnvironment:
    """An object of the class, as --rl-env-module and --rl-env-class name it, made with the arguments."""
    try:
        made = vars(importlib.import_module(module))[class_name](**arguments)
    except KeyError:
        raise BadInputError(f"rl_env_class={class_name!r}: the module {module} has no such class.") from None
    except Exception as error:
        raise BadInputError(
            f"rl_env_module={module!r}, rl_env_class={class_name!r}: importing or making it failed with "
            f"{type(error).__name__}: {error}."
        ) from error
    return check_case_environment(made)


FORMS = {"build_dataset": "tokenizer", "score_episode": "model, tokenizer, completion, case_idx"}
"""How the methods are called."""


def check_case_environment(env: Any) -> CaseEnvironment:
    """BadInputError that names the method that is missing."""
    for name in ("build_dataset", "score_episode"):
        if not callable(getattr(env, name, None)):
            raise BadInputError(f"{type(env).__name__} has no {name}: a GRPO environment needs it.")
    for name, form in FORMS.items():
        try:
            signature = inspect.signature(getattr(env, name))
        except (TypeError, ValueError):  # of some callables it cannot be read
            continue
        try:
            signature.bind(*form.split(", "))
        except TypeError as error:
            raise BadInputError(
                f"{type(env).__name__}.{name}{signature}: is called as {name}({form}): {error}."
            ) from None
    checked: CaseEnvironment = env
    return checked


@dataclass(frozen=True)
class Case:
    """prompt: text or chat messages. case_idx: what score_episode is told."""

    prompt: Any
    case_idx: int


def read_cases(env: CaseEnvironment, tokenizer: Any) -> tuple[Case, ...]:
    """The rows of build_dataset; BadInputError for none, for missing columns, for a row without a prompt."""
    rows = list(env.build_dataset(tokenizer))
    if not rows:
        raise BadInputError(f"{type(env).__name__}.build_dataset returned no rows.")
    for number, row in enumerate(rows):
        missing = [column for column in ("prompt", "case_idx") if row.get(column) is None]
        if missing:
            raise BadInputError(
                f"{type(env).__name__}.build_dataset: row {number} has no {missing[0]!r}, "
                f"but: {', '.join(row)}."
            )
        if not row["prompt"] or isinstance(row["case_idx"], bool) or not isinstance(row["case_idx"], int):
            raise BadInputError(
                f"{type(env).__name__}.build_dataset: row {number} has prompt {row['prompt']!r:.40} and "
                f"case_idx {row['case_idx']!r:.40}; a prompt that is not empty and a whole number are needed."
            )
    return tuple(Case(row["prompt"], row["case_idx"]) for row in rows)


def environment_tools(env: CaseEnvironment) -> list[Any]:
    """get_tools() where the environment has it, else no tools."""
    get_tools = getattr(env, "get_tools", None)
    return list(get_tools() or ()) if callable(get_tools) else []


def case_reward_function(
    env: CaseEnvironment, tokenizer: Any, model: Any = None
) -> Callable[..., list[float]]:
    """f(prompts, completions, case_idx, **other columns) -> scores: a reward function in GRPO's form.

    model: handed to score_episode (None: environments that score with the text alone).
    """

    def rewards(
        prompts: Sequence[Any], completions: Sequence[Any], case_idx: Sequence[int], **_: Any
    ) -> list[float]:
        scores = []
        for prompt, completion, case in zip(prompts, completions, case_idx, strict=True):
            score = env.score_episode(model, tokenizer, completion, case)
            scores.append(finite_number("score_episode returned", score, str(prompt)))
        return scores

    return rewards
