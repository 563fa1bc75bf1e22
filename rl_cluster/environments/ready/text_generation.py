"""Prompts and a reward function in, an environment that generates text token by token out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from rl_cluster.checks import check_number
from rl_cluster.data.encode import encode_text
from rl_cluster.environments.playing.actions import (
    check_end_tokens,
    check_max_length,
    check_prompts,
    token_ids,
)
from rl_cluster.environments.playing.episode import Action, Observation, RLEnvironment, StepResult
from rl_cluster.environments.playing.reward_calls import RewardFunction, reward_call
from rl_cluster.errors import BadInputError

LEVELS = ("easy", "medium", "hard")


def words_per_hundred(prompt: str, generated: str, full_text: str) -> float:
    """The default reward: number of generated words / 100."""
    return len(generated.split()) / 100.0


class TextGenerationEnv(RLEnvironment):
    """One episode continues one prompt; the reward comes at its end.

    tokenizer: of the model that plays; tokens are kept as they come, never made anew from text.
    prompts: played in order, again and again. max_length: the most tokens that an episode generates.
    reward_fn(prompt=, generated=, full_text=) -> float; default: number of generated words / 100.
    stop_sequences: texts that end an episode when they appear in what was generated; they stay in it. An
    episode also ends with an end token and at max_length. temperature: what the actions are to be sampled
    with; each observation's metadata carries it, play_episode and the trainers follow it.
    prompt_levels: {"easy": [...], ...}, other prompts for set_difficulty. end_token_ids: of the model that
    plays, beside the tokenizer's own; chat models have several. Training runs tell theirs.

    current_prompt_idx: the prompt that the next reset plays. current_text: prompt and what was generated.
    steps: number of steps of this episode. responses: what this episode generated, once it is over.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompts: Sequence[str],
        max_length: int = 512,
        reward_fn: RewardFunction | None = None,
        stop_sequences: Sequence[str] | None = None,
        temperature: float = 1.0,
        *,
        prompt_levels: Mapping[str, Sequence[str]] | None = None,
        end_token_ids: Collection[int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts = check_prompts(prompts, tokenizer)
        self.max_length = check_max_length(max_length)
        self.reward_fn = words_per_hundred if reward_fn is None else reward_fn
        self._pay = reward_call("reward_fn", self.reward_fn)
        self.stop_sequences = check_stop_sequences(stop_sequences)
        self.end_token_ids = check_end_tokens(end_token_ids, tokenizer)
        check_number("temperature", temperature, above=0.0)
        self.temperature = temperature
        levels = {} if prompt_levels is None else prompt_levels
        self._levels = {name: check_prompts(listed, tokenizer) for name, listed in levels.items()}
        self.current_prompt_idx = 0
        self.current_prompt = ""
        self.current_text = ""
        self.steps = 0
        self.responses: list[str] = []
        self._playing: int | None = None
        self._prompt_ids: list[int] = []
        self._generated: list[int] = []

    def reset(self) -> Observation:
        self._playing = self.current_prompt_idx
        self.current_prompt = self.prompts[self._playing]
        self.current_prompt_idx = (self._playing + 1) % len(self.prompts)
        self.current_text = self.current_prompt
        self.steps = 0
        self.responses = []
        self._prompt_ids = encode_text(self.tokenizer, self.current_prompt)
        self._generated = []
        return self._observe()

    def step(self, action: Action) -> StepResult:
        """Take one or many tokens; of many, what comes after the end of the episode is dropped.

        The first step of a new environment begins its first episode, as the documents' examples do; after the
        end of an episode a step is refused (BadInputError) until reset().
        info: generated_text, steps, finish_reason ("stop", "length" or None), tokens_taken (how many of the
        action's tokens count). metrics: reward, and length in generated tokens.
        """
        if self._playing is None:
            if self.responses:
                raise BadInputError("step: the episode is over; call reset() first.")
            self.reset()
        ids = token_ids(action, self.tokenizer)
        self.steps += 1
        before = len(self._generated)
        return self._result(self._take(ids), len(self._generated) - before)

    def take_end_tokens(self, end_token_ids: Collection[int]) -> None:
        """These end an episode, too: a run tells the end tokens of the model that plays."""
        self.end_token_ids = self.end_token_ids.union(end_token_ids)

    def truncate(self) -> StepResult | None:
        """A run's limit ends the episode here: score what there is. None where no episode is going on."""
        return None if self._playing is None else self._result("length", 0)

    def _result(self, finish: str | None, taken: int) -> StepResult:
        generated = self._text_of_generated()
        self.current_text = self.current_prompt + generated
        reward, metrics = (0.0, self.no_metrics()) if finish is None else self.score(*self._texts(generated))
        result = StepResult(
            reward=reward,
            done=finish is not None,
            next_observation=self._observe() if finish is None else None,
            info={
                "generated_text": generated,
                "steps": self.steps,
                "finish_reason": finish,
                "tokens_taken": taken,
            },
            metrics={"reward": reward, "length": len(self._generated)} | metrics,
        )
        if finish is not None:
            self.responses = [generated]
            self._playing = None
        return result

    def score(self, prompt: str, generated: str, full_text: str) -> tuple[float, dict[str, float]]:
        """The reward of a whole response, and its metrics; changes nothing in the episode."""
        return self._pay(prompt, generated, full_text), {}

    def no_metrics(self) -> dict[str, float]:
        """The metrics of a step that is not the last."""
        return {}

    def set_difficulty(self, level: str) -> None:
        """Play the prompts of this level from the next reset on."""
        if level not in self._levels:
            known = ", ".join(self._levels) or "none; pass prompt_levels={...}"
            raise BadInputError(f"set_difficulty({level!r}): the levels of this environment are: {known}.")
        self.prompts = self._levels[level]
        self.current_prompt_idx = 0

    def render(self) -> str:
        generated = self.current_text[len(self.current_prompt) :]
        return f"Prompt: {self.current_prompt}\nGenerated: {generated}\nSteps: {self.steps}"

    def _texts(self, generated: str) -> tuple[str, str, str]:
        return self.current_prompt, generated, self.current_prompt + generated

    def _take(self, ids: Sequence[int]) -> str | None:
        """Add tokens until the episode ends; how it ended, or None."""
        for token in ids:
            self._generated.append(token)
            if token in self.end_token_ids or self._has_stop_sequence():
                return "stop"
            if len(self._generated) >= self.max_length:
                return "length"
        return None

    def _has_stop_sequence(self) -> bool:
        if not self.stop_sequences:
            return False
        text = self._decode(self._generated, skip_special=False)
        return any(sequence in text for sequence in self.stop_sequences)

    def _text_of_generated(self) -> str:
        # Decoded behind the prompt: on its own, many tokenizers drop a response's leading space.
        before = self._decode(self._prompt_ids, skip_special=True)
        whole = self._decode([*self._prompt_ids, *self._generated], skip_special=True)
        if whole.startswith(before):
            return whole[len(before) :]
        return self._decode(self._generated, skip_special=True)

    def _decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        )

    def _observe(self) -> Observation:
        ids = torch.tensor([[*self._prompt_ids, *self._generated]], dtype=torch.int64)
        metadata = {"prompt_idx": self._playing, "steps": self.steps, "temperature": self.temperature}
        return Observation(ids, torch.ones_like(ids), self.current_prompt, metadata)


def check_stop_sequences(stop_sequences: Sequence[str] | None) -> list[str]:
    if stop_sequences is None:
        return []
    if isinstance(stop_sequences, str) or not all(isinstance(s, str) and s for s in stop_sequences):
        raise BadInputError(f"stop_sequences={stop_sequences!r:.60}: must be a list of texts, none empty.")
    return list(stop_sequences)
