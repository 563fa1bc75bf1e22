"""TRL's reward functions f(prompts=, completions=, **columns) in; scorers of a run out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.reward_signatures import RewardCall
from rl_cluster.trainers.rewards_given import (
    CheckedScorer,
    RewardSource,
    check_single_label,
    distinct,
    is_sequence_classifier,
    name_of,
    reward_source,
)


class ColumnCall:
    """Calls one of the user's functions with what it takes. state: TrainerState, once there is one.

    Chat prompts arrive as their messages, and completions then as [{"role": "assistant", "content": …}].
    """

    def __init__(
        self, function: Callable[..., Any], chats: Mapping[str, Any], columns: Sequence[str]
    ) -> None:
        """chats: prompt's text -> messages. columns: of the data set. BadInputError for other signatures."""
        self.state: Any = None
        self._function = function
        self._chats = chats
        self._columns = tuple(columns)
        self._taken = _taken(function, ("prompts", "completions", "trainer_state", *self._columns))

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Any]) -> Any:
        pairs = list(zip(prompts, responses, strict=True))
        arguments: dict[str, Any] = {
            "prompts": [self._chats.get(prompt, prompt) for prompt in prompts],
            "completions": [
                [{"role": "assistant", "content": response}] if prompt in self._chats else response
                for prompt, response in pairs
            ],
            "trainer_state": self.state,
            **{name: [row.get(name) for row in metadata] for name in self._columns},
        }
        return self._function(**{name: value for name, value in arguments.items() if name in self._taken})


def _taken(function: Callable[..., Any], offered: Sequence[str]) -> frozenset[str]:
    """The names among `offered` that the function takes; BadInputError if it needs others."""
    name = name_of(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset(offered)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        named = frozenset(offered)
    else:
        named = frozenset(p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY) & frozenset(offered)
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    lacking = [need for need in needed if need not in named]
    if lacking or "completions" not in named:
        what = f"needs {lacking[0]!r}" if lacking else "does not take 'completions'"
        raise BadInputError(
            f"reward_funcs: {name} {what}. A reward function is called with prompts=, completions= and a "
            f"keyword per column of the data set; here: {', '.join(offered)}."
        )
    return named


def grpo_rewards(
    reward_funcs: Any,
    weights: Sequence[float] | None,
    tokenizer: Any,
    tokenizers: Any,
    chats: Mapping[str, Any],
    columns: Sequence[str],
) -> tuple[tuple[RewardSource, ...], list[ColumnCall]]:
    """One source per reward, named and weighted; and the calls that are to be told of the trainer's state.

    reward_funcs: one or a list of paths, models for sequence classification, RewardModels and functions.
    tokenizers: reward_processing_classes, for the models.
    """
    rewards = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    if not rewards or any(reward is None for reward in rewards):
        raise BadInputError("reward_funcs: give a function, a model, or a list of them.")
    weights = [1.0] * len(rewards) if weights is None else list(weights)
    if len(weights) != len(rewards):
        raise BadInputError(f"GRPOConfig.reward_weights: {len(weights)} weights for {len(rewards)} rewards.")
    of_models = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers] * len(rewards)
    if len(of_models) != len(rewards):
        raise BadInputError(
            f"reward_processing_classes: {len(of_models)} tokenizers for {len(rewards)} rewards; None is "
            "allowed for functions."
        )
    sources: list[RewardSource] = []
    calls: list[ColumnCall] = []
    for number, (reward, weight, own) in enumerate(zip(rewards, weights, of_models, strict=True)):
        field = f"reward_funcs[{number}]"
        check_number(f"GRPOConfig.reward_weights[{number}]", weight)
        sources.append(_source(reward, float(weight), tokenizer, own, field, calls, chats, columns))
    return distinct(sources), calls


def _source(
    reward: Any,
    weight: float,
    tokenizer: Any,
    own: Any,
    field: str,
    calls: list[ColumnCall],
    chats: Mapping[str, Any],
    columns: Sequence[str],
) -> RewardSource:
    if is_sequence_classifier(reward):
        check_single_label(reward, field)
        return RewardSource("reward_model", weight, module=reward, tokenizer=own)
    if isinstance(reward, str) or hasattr(reward, "state_dict") or not callable(reward):
        made = reward_source(reward, own or tokenizer, field, {})
        return RewardSource(made.name, weight, made.path, made.module, own, made.scorer)
    call = ColumnCall(reward, chats, columns)
    calls.append(call)
    checked = RewardCall(call, "batch", metadata="position")
    scorer = CheckedScorer(checked, name_of(reward), none_is_missing=True)
    return RewardSource(name_of(reward), weight, scorer=scorer)
