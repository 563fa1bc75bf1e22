"""What a trainer's user gives as reward in; a scorer's section of the RunConfig and its function out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat

from rl_cluster.errors import BadInputError
from rl_cluster.rewards.answers import LARGEST_SCORE
from rl_cluster.rewards.safe_text import repr_text
from rl_cluster.trainers.reward_signatures import RewardCall, RewardScorer, reward_call

TIMEOUT_SECONDS = 3600.0
"""For one call of a user's function, which may well ask a big model."""


class CheckedScorer:
    """`score` is a scorer f(prompts, responses, metadata) of checked numbers. problem: the first wrong one.

    The loop reports a failing scorer by name; `problem` says in the user's words what to correct.
    """

    def __init__(
        self,
        call: RewardCall,
        field: str,
        plain: Mapping[str, str] | None = None,
        none_is_missing: bool = False,
    ) -> None:
        """plain: prompt's text -> what the function is to see in its place. none_is_missing: None is kept,
        and is no reward; else it is refused."""
        self._scorer = RewardScorer(call)
        self._field = field
        self._plain = plain or {}
        self._none_is_missing = none_is_missing
        self.problem: BadInputError | None = None

    async def score(
        self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]
    ) -> list[float | None]:
        shown = [self._plain.get(prompt, prompt) for prompt in prompts]
        try:
            answers = await self._scorer(shown, responses, metadata)
            return [
                None if reward is None and self._none_is_missing else _finite(reward, self._field, text)
                for reward, text in zip(answers, responses, strict=True)
            ]
        except BadInputError as error:
            self.problem = self.problem or error
            raise


def _finite(reward: Any, field: str, text: str) -> float:
    try:
        value = float(reward) if isinstance(reward, SupportsFloat) else math.nan
    except Exception:  # noqa: BLE001 — an object of the user's own may raise anything
        value = math.nan
    if not abs(value) <= LARGEST_SCORE:
        raise BadInputError(
            f"{field} returned {repr_text(reward, 60)} for the completion {text!r:.60}: a finite number of "
            f"float32 (up to {LARGEST_SCORE:.3g}) is needed."
        )
    return value


@dataclass(frozen=True)
class RewardSource:
    """One reward. Exactly one of path, module and scorer: a sequence-classification checkpoint by name, such
    a model as an object (saved at the start, with `tokenizer` or else the policy's), or a function here.
    is_environment: the score of an environment, whose episodes are counted; it is not tried beforehand."""

    name: str
    weight: float = 1.0
    path: str | None = None
    module: Any = None
    tokenizer: Any = None
    scorer: CheckedScorer | None = None
    is_environment: bool = False

    def section(self, saved: str | None = None) -> dict[str, Any]:
        """The scorer's entry of rewards.scorers. saved: where the module lies."""
        if self.scorer is not None:
            kind: dict[str, Any] = {"kind": "callable", "timeout_seconds": TIMEOUT_SECONDS}
        else:
            kind = {"kind": "reward_model", "path": self.path or saved or "start/reward"}
        return {**kind, "name": self.name, "weight": self.weight}


def reward_source(reward: Any, tokenizer: Any, field: str, plain: Mapping[str, str]) -> RewardSource:
    """A path, a model for sequence classification, a RewardModel, or a function of full texts.

    Functions of the other documented forms (f(prompts, responses, metadata=None),
    f(prompt, generated, full_text)) are told by the names of their parameters. plain: prompts as such
    functions are to see them, without special tokens. BadInputError, which names `field`, for all else.
    """
    if isinstance(reward, str):
        return RewardSource("reward_model", path=reward)
    if is_sequence_classifier(reward):
        check_single_label(reward, field)
        return RewardSource("reward_model", module=reward)
    call = _call_of(reward, tokenizer, field)
    shown = plain if call.form == "texts" else {}
    return RewardSource(name_of(reward), scorer=CheckedScorer(call, field, shown))


def _call_of(reward: Any, tokenizer: Any, field: str) -> RewardCall:
    try:
        return reward_call(reward, tokenizer, field)
    except BadInputError:
        if not callable(reward) or isinstance(reward, type) or hasattr(reward, "state_dict"):
            raise
        # The documented form, whatever the parameters are called.
        return RewardCall(reward, "texts")


def is_sequence_classifier(value: Any) -> bool:
    """A transformers model with a `score` or `classifier` head, told without importing transformers."""
    return callable(getattr(value, "save_pretrained", None)) and any(
        hasattr(value, head) for head in ("score", "classifier", "classification_head")
    )


def check_single_label(model: Any, field: str) -> None:
    """BadInputError for a model with more than one label: which one would be the reward?"""
    labels = getattr(getattr(model, "config", None), "num_labels", 1)
    if labels != 1:
        raise BadInputError(
            f"{field}: {type(model).__name__} has num_labels={labels}; a reward model has 1. Load it with "
            "num_labels=1."
        )


def name_of(reward: Callable[..., Any]) -> str:
    """As it appears in rewards/NAME."""
    name = getattr(reward, "__name__", type(reward).__name__)
    return name if name.isidentifier() else "reward"


def distinct(sources: Sequence[RewardSource]) -> tuple[RewardSource, ...]:
    """With -2, -3 … behind names that occur more than once."""
    seen: dict[str, int] = {}
    named = []
    for source in sources:
        seen[source.name] = number = seen.get(source.name, 0) + 1
        name = source.name if number == 1 else f"{source.name}-{number}"
        named.append(replace(source, name=name))
    return tuple(named)
