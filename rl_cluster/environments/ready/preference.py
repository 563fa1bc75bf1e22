"""Prompts and a judge in; an environment that compares two responses per prompt, and a file of pairs, out."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_cluster.data.encode import encode_text
from rl_cluster.environments.playing.actions import (
    check_end_tokens,
    check_max_length,
    check_prompts,
    cut_at_end,
    token_ids,
)
from rl_cluster.environments.playing.episode import Action, Observation, RLEnvironment, StepResult
from rl_cluster.environments.playing.reward_calls import finite_number
from rl_cluster.environments.playing.text_scores import pair_score, text_scores
from rl_cluster.errors import BadInputError

Comparison = Callable[[str, str, str], float]
"""f(prompt, first, second) -> above 0 if the first is better, below 0 if the second is."""


class PreferenceComparisonEnv(RLEnvironment):
    """Two steps per episode, each a whole response; the second one's reward says which is better.

    The reward is above 0 if the first response is preferred, below 0 if the second is, 0 if undecided.
    preference_model: a RewardModel, a sequence classifier or f(texts) -> scores, which gives the difference
    of the scores of prompt + response; or a PairwiseRewardModel, which compares the two directly.
    human_feedback_fn(prompt, first, second) -> number decides where both are given; where it answers None the
    model does. max_length: the most tokens of a response. pairs_path: a JSONL file to which every decided
    comparison is appended as {"prompt", "chosen", "rejected"}, which DPO and reward-model training read.

    end_token_ids: of the model that plays, beside the tokenizer's own.
    responses: of this episode. pairs: all decided comparisons so far, oldest first.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompts: Sequence[str],
        preference_model: Any = None,
        human_feedback_fn: Callable[[str, str, str], float | None] | None = None,
        max_length: int = 512,
        *,
        pairs_path: str | Path | None = None,
        end_token_ids: Collection[int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts = check_prompts(prompts, tokenizer)
        self.max_length = check_max_length(max_length)
        self.end_token_ids = check_end_tokens(end_token_ids, tokenizer)
        if human_feedback_fn is not None and not callable(human_feedback_fn):
            raise BadInputError(f"human_feedback_fn={human_feedback_fn!r:.60}: must be a function.")
        self.preference_model = preference_model
        self.human_feedback_fn = human_feedback_fn
        self._compare = None if preference_model is None else model_comparison(preference_model, tokenizer)
        self.pairs_path = None if pairs_path is None else check_pairs_path(pairs_path)
        self.pairs: list[dict[str, str]] = []
        self.current_prompt_idx = 0
        self.current_prompt = ""
        self.responses: list[str] = []
        self._playing: int | None = None

    def reset(self) -> Observation:
        self._playing = self.current_prompt_idx
        self.current_prompt = self.prompts[self._playing]
        self.current_prompt_idx = (self._playing + 1) % len(self.prompts)
        self.responses = []
        return self._observe()

    def step(self, action: Action) -> StepResult:
        """Take a whole response as tokens, cut at the end token and at max_length.

        info: responses, preferred (0, 1 or None), pair. metrics: reward, num_responses, and preference_model
        where there is one.
        """
        if self._playing is None or len(self.responses) >= 2:
            raise BadInputError("step: no comparison is going on; call reset() first.")
        ids, _ = cut_at_end(token_ids(action, self.tokenizer), self.end_token_ids, self.max_length)
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.responses.append(str(text))
        if len(self.responses) < 2:
            return self._result(0.0, {"preferred": None, "pair": None}, {})
        first, second = self.responses
        reward, metrics = self._judge(first, second)
        self._playing = None
        pair = preference_pair(self.current_prompt, first, second, reward)
        if pair is not None:
            self.pairs.append(pair)
            if self.pairs_path is not None:
                append_pairs(self.pairs_path, [pair])
        preferred = None if pair is None else int(reward < 0)
        return self._result(reward, {"preferred": preferred, "pair": pair}, metrics)

    def take_end_tokens(self, end_token_ids: Collection[int]) -> None:
        """These end a response, too: a run tells the end tokens of the model that plays."""
        self.end_token_ids = self.end_token_ids.union(end_token_ids)

    def save_pairs(self, path: str | Path) -> Path:
        """Write all pairs so far to a JSONL file of their own, replacing it."""
        target = check_pairs_path(path)
        target.write_text("".join(_line(pair) for pair in self.pairs), encoding="utf-8")
        return target

    def render(self) -> str:
        numbered = [f"Response {number}: {text}" for number, text in enumerate(self.responses, start=1)]
        return "\n".join([f"Prompt: {self.current_prompt}", *numbered])

    def _judge(self, first: str, second: str) -> tuple[float, dict[str, float]]:
        metrics = {}
        reward = 0.0
        if self._compare is not None:
            reward = self._compare(self.current_prompt, first, second)
            metrics["preference_model"] = reward
        if self.human_feedback_fn is not None:
            answer = self.human_feedback_fn(self.current_prompt, first, second)
            if answer is not None:
                reward = finite_number("human_feedback_fn returned", answer, self.current_prompt)
        return reward, metrics

    def _result(self, reward: float, info: dict[str, Any], metrics: dict[str, float]) -> StepResult:
        done = self._playing is None
        return StepResult(
            reward=reward,
            done=done,
            next_observation=None if done else self._observe(),
            info={"responses": list(self.responses)} | info,
            metrics={"reward": reward, "num_responses": float(len(self.responses))} | metrics,
        )

    def _observe(self) -> Observation:
        ids = torch.tensor([encode_text(self.tokenizer, self.current_prompt)], dtype=torch.int64)
        metadata = {"comparison_round": len(self.responses), "prompt_idx": self._playing}
        return Observation(ids, torch.ones_like(ids), self.current_prompt, metadata)


def model_comparison(model: Any, tokenizer: Any) -> Comparison:
    """How far `model` puts the first response before the second, in its own units (logits, scores)."""
    if hasattr(model, "forward_pair"):
        return lambda prompt, first, second: finite_number(
            "preference_model answered", pair_score(model, tokenizer, prompt + first, prompt + second), prompt
        )
    scores = text_scores(model, tokenizer, "preference_model")

    def compare(prompt: str, first: str, second: str) -> float:
        better, worse = scores([prompt + first, prompt + second])
        return better - worse

    return compare


def preference_pair(prompt: str, first: str, second: str, preference: float) -> dict[str, str] | None:
    """{"prompt", "chosen", "rejected"}; None where undecided, or where the responses are the same text."""
    if preference == 0 or first == second:
        return None
    chosen, rejected = (first, second) if preference > 0 else (second, first)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def append_pairs(path: Path, pairs: Sequence[dict[str, str]]) -> None:
    """One JSON object per line, UTF-8; written in one piece, so that a killed run leaves whole lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(_line(pair) for pair in pairs))


def check_pairs_path(path: str | Path) -> Path:
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        problem = "is a folder" if target.is_dir() else f"the folder {target.parent} does not exist"
        raise BadInputError(f"pairs_path={str(path)!r}: {problem}. Give the path of a file to write.")
    return target


def _line(pair: dict[str, str]) -> str:
    return json.dumps(pair, ensure_ascii=False) + "\n"
