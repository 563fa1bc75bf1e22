"""A run's prompt and an environment in; the first observation of the episode of that very prompt out."""

from __future__ import annotations

from typing import Any

from rl_cluster.environments.playing.episode import Observation
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt


class UnknownPromptError(BadInputError):
    """The run's data and the environment do not belong together."""


def start_environment(env: Any, prompt: Prompt, seed: int) -> Observation:
    """Begin the episode of `prompt`; all samples of a group get the same prompt and seed.

    An environment with `start(prompt, metadata, seed)` is asked by that; metadata: the row's other columns.
    One with `prompts` and `current_prompt_idx` is set to the prompt, found by metadata["prompt_idx"] or its
    text, and reset. Any other is just reset; the player checks that it shows the prompt.
    """
    start = getattr(env, "start", None)
    if callable(start):
        begun: Observation = start(prompt.text, dict(prompt.metadata), seed)
        return begun
    prompts = getattr(env, "prompts", None)
    if prompts is not None and hasattr(env, "current_prompt_idx"):
        env.current_prompt_idx = _index(prompts, prompt, type(env).__name__)
    reset: Observation = env.reset()
    return reset


def _index(prompts: Any, prompt: Prompt, environment: str) -> int:
    given = prompt.metadata.get("prompt_idx")
    if isinstance(given, int) and 0 <= given < len(prompts) and prompts[given] == prompt.text:
        return given
    try:
        return list(prompts).index(prompt.text)
    except ValueError:
        raise UnknownPromptError(
            f"{prompt.prompt_id}: {environment} has no prompt {prompt.text!r:.80}. Train on the "
            "environment's own prompts (prompts_of), or give it start(prompt, metadata, seed)."
        ) from None
