"""A user's reward in any of its documented forms in; one scorer f(prompts, responses, metadata) out.

Three functions: f(prompts, responses, metadata=None) -> list; f(prompt, generated, full_text) -> float;
f(list of full texts) -> list; any of them may be a coroutine function. Or a model with `as_reward_fn` or
`predict_rewards`. Which one it is, is read from the names and the number of the parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_cluster.assembly.together import Together
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.calling import is_the_functions_own, resolve
from rl_cluster.rewards.local_scorer import in_thread
from rl_cluster.rewards.safe_text import error_text, repr_text

Form = Literal["batch", "sample", "texts"]
Rows = Sequence[Mapping[str, Any]]

FORMS = "f(prompts, responses, metadata=None), f(prompt, generated, full_text) or f(texts)"
SAMPLE_NAMES = ("prompt", "generated", "full_text")
BATCH_NAMES = ("prompts", "responses")


@dataclass(frozen=True)
class RewardCall:
    """form: how `function` wants its arguments. metadata: "name", "position" or None, if it takes them."""

    function: Callable[..., Any]
    form: Form
    by_name: bool = False
    metadata: Literal["name", "position"] | None = None

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], metadata: Rows) -> Any:
        """Whatever the function returns; for the form `sample` a list of it."""
        if self.form == "sample":
            return [self._one(*pair) for pair in zip(prompts, responses, strict=True)]
        if self.form == "texts":
            return self.function([p + r for p, r in zip(prompts, responses, strict=True)])
        pair = {"prompts": list(prompts), "responses": list(responses)}
        named = {"metadata": list(metadata)} if self.metadata == "name" else {}
        positions = [list(metadata)] if self.metadata == "position" else []
        if self.by_name:
            return self.function(**pair, **named)
        return self.function(*pair.values(), *positions, **named)

    def _one(self, prompt: str, generated: str) -> Any:
        values = (prompt, generated, prompt + generated)
        if self.by_name:
            return self.function(**dict(zip(SAMPLE_NAMES, values, strict=True)))
        return self.function(*values)


def reward_call(reward: Any, tokenizer: Any, field: str = "reward_fn") -> RewardCall:
    """reward: a function, or a model. tokenizer: for models. BadInputError names `field`."""
    if callable(getattr(reward, "as_reward_fn", None)):
        return RewardCall(reward.as_reward_fn(tokenizer), "batch", metadata="position")
    if callable(getattr(reward, "predict_rewards", None)):
        return RewardCall(_of_model(reward, tokenizer), "texts")
    if not callable(reward) or isinstance(reward, type):
        raise BadInputError(
            f"{field}={reward!r:.60}: must be a function {FORMS}, or a reward model with predict_rewards."
        )
    if hasattr(reward, "parameters") and hasattr(reward, "state_dict"):
        raise BadInputError(
            f"{field} is a {type(reward).__name__}, a module that scores no texts: no predict_rewards. "
            f"Give a RewardModel, or a function {FORMS} that calls it."
        )
    return _read_signature(reward, field)


def _of_model(model: Any, tokenizer: Any) -> Callable[[list[str]], list[float]]:
    def score(texts: list[str]) -> list[float]:
        rows = model.predict_rewards(texts, tokenizer)
        return [float(row[0]) if isinstance(row, Sequence) and len(row) == 1 else row for row in rows]

    return score


def _read_signature(function: Callable[..., Any], field: str) -> RewardCall:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise _ambiguous(field, "has no signature that could be read") from None
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    if set(SAMPLE_NAMES) & names and _binds(signature, SAMPLE_NAMES):
        return RewardCall(function, "sample", by_name=True)
    if set(BATCH_NAMES) <= names:
        takes = any(p.kind is p.VAR_KEYWORD for p in parameters) or "metadata" in names
        if not _binds(signature, (*BATCH_NAMES, "metadata") if takes else BATCH_NAMES):
            raise _ambiguous(field, f"takes {signature}")
        return RewardCall(function, "batch", by_name=True, metadata="name" if takes else None)
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise _ambiguous(field, f"takes {signature}, which says nothing")
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        raise _ambiguous(field, f"takes {signature}")
    required = [p for p in positional if p.default is p.empty]
    if len(required) == 1 and required == positional:
        return RewardCall(function, "texts")
    if len(required) == 2:
        metadata: Literal["position"] | None = "position" if len(positional) > 2 else None
        return RewardCall(function, "batch", metadata=metadata)
    raise _ambiguous(field, f"takes {signature}")


def _binds(signature: inspect.Signature, names: Sequence[str]) -> bool:
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError:
        return False
    return True


def _ambiguous(field: str, what: str) -> BadInputError:
    return BadInputError(f"{field} {what}: how is it to be called? Name its parameters as in one of {FORMS}.")


class RewardScorer:
    """The asynchronous scorer of a run, for the kind `callable`: groups that are scored at the same time are
    handed to the user's function together, in a thread, one call at a time.

    A call that fails for several groups is repeated for each by itself, to find the culprit.
    """

    def __init__(self, call: RewardCall | None) -> None:
        """call: may be set later, before the first scoring; None: there is nothing to score with."""
        self.call = call
        self._together: Together[_Item, Any] = Together(self._work)

    async def __call__(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> Any:
        """One entry per response; raises what the function raises, and for a wrong number of rewards."""
        answer = await self._together.ask(_Item(prompts, responses, metadata))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _work(self, items: Sequence[_Item], abandoned: Callable[[], bool]) -> list[Any]:
        del abandoned
        try:
            rewards = await self._ask([row for item in items for row in item.rows])
        except Exception as error:  # noqa: BLE001 — the user's code may raise anything
            if len(items) == 1:
                return [error]
            return [(await self._work([item], lambda: False))[0] for item in items]
        answers, start = [], 0
        for item in items:
            answers.append(rewards[start : start + len(item.prompts)])
            start += len(item.prompts)
        return answers

    async def _ask(self, rows: Sequence[tuple[str, str, dict[str, Any]]]) -> list[Any]:
        prompts, responses = [row[0] for row in rows], [row[1] for row in rows]
        metadata = [row[2] for row in rows]
        call = self.call
        if call is None:
            raise BadInputError("reward_fn: there is none to score responses with.")
        answer = await in_thread(lambda: call(prompts, responses, metadata))
        try:
            answer = await resolve(answer)
            if call.form == "sample":
                answer = [await resolve(one) for one in answer]
        except BaseException as error:
            if isinstance(error, Exception) or not is_the_functions_own(error):
                raise
            # SystemExit and KeyboardInterrupt would end the event loop.
            raise RuntimeError(error_text(error)) from None
        return checked_rewards(answer, len(rows))


@dataclass(frozen=True)
class _Item:
    prompts: list[str]
    responses: list[str]
    metadata: list[dict[str, Any]]

    @property
    def rows(self) -> list[tuple[str, str, dict[str, Any]]]:
        return list(zip(self.prompts, self.responses, self.metadata, strict=True))


class WrongAnswerError(BadInputError):
    """A reward function's answer is no list of one entry per response."""


def checked_rewards(answer: Any, expected: int) -> list[Any]:
    """answer (a list, array or tensor) as a list of so many entries; WrongAnswerError otherwise."""
    if isinstance(answer, str | bytes | Mapping) or not hasattr(answer, "__len__"):
        raise WrongAnswerError(
            f"the reward function returned {type(answer).__name__} {repr_text(answer, 60)}: a list of "
            f"{expected} numbers is needed, one per response."
        )
    if len(answer) != expected:
        raise WrongAnswerError(
            f"the reward function returned {len(answer)} rewards for {expected} responses; return one each."
        )
    return list(answer)
