"""An environment in, a function that scores many finished responses at once out, for trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from rl_cluster.data.encode import encode_text
from rl_cluster.environments.playing.episode import RLEnvironment
from rl_cluster.environments.playing.text_scores import text_scores
from rl_cluster.errors import BadInputError


@runtime_checkable
class ResponseScorer(Protocol):
    """What an environment needs so that whole responses can be scored without playing them."""

    prompts: list[str]

    def score(self, prompt: str, generated: str, full_text: str) -> tuple[float, dict[str, float]]: ...


def environment_scorer(env: RLEnvironment) -> Callable[..., list[dict[str, float]]]:
    """f(prompts, responses, metadata) -> [{"score": reward, component: value, …}], a scorer of the main loop.

    env: a TextGenerationEnv or MultiObjectiveRewardEnv, or any with a `score(prompt, generated, full_text)`.
    """
    scored = _with_score(env)

    def score(
        prompts: Sequence[str], responses: Sequence[str], metadata: Any = None
    ) -> list[dict[str, float]]:
        rows = []
        for prompt, response in zip(prompts, responses, strict=True):
            reward, metrics = scored.score(prompt, response, prompt + response)
            rows.append({"score": reward} | {name.removeprefix("reward_"): v for name, v in metrics.items()})
        return rows

    return score


def create_env_aware_reward_fn(
    env: RLEnvironment | None, reward_model: Any, tokenizer: Any
) -> Callable[[Sequence[Any]], list[float]]:
    """f(samples) -> one reward per sample; a sample is token ids (int64 [T]) or text, prompt included.

    env: its reward for the response, which is what follows the prompt of the environment that the sample
    begins with (all of it where none fits). reward_model: its score of the whole text (see text_scores). With
    both, their sum. With neither, a default for trying things out: 0.5 if the text has one of . ! ? in it,
    less 0.01 for each word beyond 50.
    """
    scored = None if env is None else _with_score(env)
    scores = None if reward_model is None else text_scores(reward_model, tokenizer)

    def rewards(samples: Sequence[Any]) -> list[float]:
        texts = [_text(sample, tokenizer) for sample in samples]
        if scored is None and scores is None:
            return [_default_reward(text) for text in texts]
        total = [0.0] * len(texts) if scores is None else scores(texts)
        if scored is None:
            return total
        known = _as_decoded(scored.prompts, tokenizer)
        return [a + scored.score(*_split(text, known))[0] for a, text in zip(total, texts, strict=True)]

    return rewards


def _with_score(env: Any) -> ResponseScorer:
    if not isinstance(env, ResponseScorer):
        raise BadInputError(
            f"env is {type(env).__name__}: it cannot score a response by itself. Use a TextGenerationEnv or "
            "MultiObjectiveRewardEnv, or give yours prompts and score(prompt, generated, full_text)."
        )
    return env


def _text(sample: Any, tokenizer: Any) -> str:
    if isinstance(sample, str):
        return sample
    if not isinstance(sample, torch.Tensor) or sample.is_floating_point():
        raise BadInputError(f"sample is {type(sample).__name__}: a tensor of token ids or a text is needed.")
    return _decode(sample.reshape(-1).tolist(), tokenizer)


def _decode(ids: Sequence[int], tokenizer: Any) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


def _as_decoded(prompts: Sequence[str], tokenizer: Any) -> Mapping[str, str]:
    """How each prompt reads after a way through the tokenizer (spaces, unknown characters) → the prompt."""
    decoded = {_decode(encode_text(tokenizer, prompt), tokenizer): prompt for prompt in prompts}
    return decoded | {prompt: prompt for prompt in prompts}


def _split(text: str, known: Mapping[str, str]) -> tuple[str, str, str]:
    """(prompt, generated, full text), by the longest known prompt that the text begins with."""
    begins = max((shown for shown in known if text.startswith(shown)), key=len, default=None)
    if begins is None:
        return "", text, text
    generated = text[len(begins) :]
    return known[begins], generated, known[begins] + generated


def _default_reward(text: str) -> float:
    return (0.5 if any(mark in text for mark in ".!?") else 0.0) - 0.01 * max(0, len(text.split()) - 50)
