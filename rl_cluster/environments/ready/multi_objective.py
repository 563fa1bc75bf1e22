"""Several reward functions and their weights in, an environment that pays their weighted sum out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.environments.playing.reward_calls import RewardFunction, reward_call
from rl_cluster.environments.ready.text_generation import TextGenerationEnv
from rl_cluster.errors import BadInputError


class MultiObjectiveRewardEnv(TextGenerationEnv):
    """As TextGenerationEnv, but the reward is Σ reward_weights[name] · reward_components[name](…).

    reward_components: {name: f(prompt, generated, full_text) -> float}. reward_weights: {name: weight}; 1 for
    a component without one. metrics: reward_NAME of each component, before its weight, and reward_total;
    all 0 until the episode is over.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompts: Sequence[str],
        reward_components: Mapping[str, RewardFunction],
        reward_weights: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if "reward_fn" in kwargs:
            raise BadInputError("reward_fn: a MultiObjectiveRewardEnv takes reward_components instead.")
        super().__init__(tokenizer, prompts, **kwargs)
        if not isinstance(reward_components, Mapping) or not reward_components:
            raise BadInputError(
                f"reward_components={reward_components!r:.60}: must be a dict {{name: function}}, not empty."
            )
        self.reward_components = dict(reward_components)
        self._calls = {
            name: reward_call(f"reward_components[{name!r}]", function)
            for name, function in self.reward_components.items()
        }
        weights = {} if reward_weights is None else dict(reward_weights)
        for name, weight in weights.items():
            if name not in self.reward_components:
                known = ", ".join(self.reward_components)
                raise BadInputError(f"reward_weights[{name!r}]: no such component. There are: {known}.")
            check_number(f"reward_weights[{name!r}]", weight)
        self.reward_weights = {name: weights.get(name, 1.0) for name in self.reward_components}

    def compute_multi_objective_reward(
        self, prompt: str, generated: str, full_text: str
    ) -> tuple[float, dict[str, float]]:
        """(weighted sum, {name: reward before its weight})."""
        parts = {name: call(prompt, generated, full_text) for name, call in self._calls.items()}
        return sum(self.reward_weights[name] * part for name, part in parts.items()), parts

    def score(self, prompt: str, generated: str, full_text: str) -> tuple[float, dict[str, float]]:
        total, parts = self.compute_multi_objective_reward(prompt, generated, full_text)
        return total, {f"reward_{name}": part for name, part in parts.items()} | {"reward_total": total}

    def no_metrics(self) -> dict[str, float]:
        return {f"reward_{name}": 0.0 for name in self._calls} | {"reward_total": 0.0}
