"""An environment and a player in, the Trajectory of one episode out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_cluster.environments.playing.episode import Observation, RLEnvironment, Trajectory
from rl_cluster.errors import BadInputError

Player = Callable[[Observation], tuple[torch.Tensor, torch.Tensor]]
"""f(observation) -> (action int64 [n], its log-probabilities float32 [n])."""


def play_episode(env: RLEnvironment, player: Player, max_steps: int = 10_000) -> Trajectory:
    """Reset, then step until the episode is over. BadInputError if it is not over after max_steps."""
    observation = env.reset()
    observations, actions, rewards, logprobs = [], [], [], []
    for _ in range(max_steps):
        action, logprob = player(observation)
        result = env.step(action)
        observations.append(observation)
        actions.append(action)
        rewards.append(result.reward)
        logprobs.append(logprob)
        if result.done:
            return Trajectory(
                observations, actions, rewards, logprobs, True, float(sum(rewards)), dict(result.metrics)
            )
        if result.next_observation is None:
            raise BadInputError("the environment's step gave no next_observation, though it is not done.")
        observation = result.next_observation
    raise BadInputError(f"max_steps={max_steps}: the episode was not over by then.")


def model_player(model: Any, generator: torch.Generator | None = None) -> Player:
    """A player that samples one token at a time from a causal language model.

    At the temperature of the observation's metadata (1 where there is none); the log-probability is that of
    the drawn token at that temperature. Without a cache: meant for small models and for trying things out.
    """

    @torch.no_grad()
    def play(observation: Observation) -> tuple[torch.Tensor, torch.Tensor]:
        device = next(model.parameters()).device
        output = model(
            input_ids=observation.input_ids.to(device), attention_mask=observation.attention_mask.to(device)
        )
        logits = output.logits[0, -1].float().cpu() / observation.metadata.get("temperature", 1.0)
        logprobs = torch.log_softmax(logits, dim=-1)
        token = torch.multinomial(logprobs.exp(), 1, generator=generator)
        return token, logprobs[token]

    player: Player = play  # torch.no_grad forgets the types
    return player
