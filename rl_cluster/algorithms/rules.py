"""An algorithm's config and a scored batch go in, advantages per token come out: advantages.py combined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rl_cluster.algorithms.advantages import (
    WHITEN_EPSILON,
    batch_std,
    discounted_returns,
    gae,
    group_centred,
    group_normalised,
    leave_one_out,
    only_counted,
    whiten,
)
from rl_cluster.algorithms.grid import ActionGrid
from rl_cluster.algorithms.kl import kl_per_token
from rl_cluster.batch import TokenBatch
from rl_cluster.config.algorithm import GRPO, PPO, RLOO, KLConfig, Reinforce


@dataclass(frozen=True)
class AdvantageInputs:
    """batch: N rows, T tokens; proximal_logprobs (or, where the weights have not moved, behaviour_logprobs)
    are the policy's; reference_logprobs where there is a β; values where there is a critic.
    scores: float64 [N], shaped; NaN where a row has no reward, whose advantages are then 0 and which is in no
    baseline (and a critic's target there is what the critic says). kl_coef: β as the controller has it now.
    """

    batch: TokenBatch
    scores: np.ndarray
    kl_coef: float


@dataclass(frozen=True)
class AdvantageOutputs:
    """advantages: float32 [T], 0 where not an action. returns: float32 [T], the critic's targets, or None.

    kl: float64 [N], Σ over the row's actions of the configured estimator; None without a reference.
    non_score_reward: float64 [N], −β · kl where the penalty is part of the reward, else 0; scores +
    non_score_reward is TRL's rlhf_reward.
    """

    advantages: np.ndarray
    returns: np.ndarray | None
    kl: np.ndarray | None
    non_score_reward: np.ndarray


class _HasKL(Protocol):
    @property
    def kl(self) -> KLConfig: ...


@dataclass(frozen=True)
class _Rewards:
    """token_grid: float64 [N, L], what each action earns or pays by itself. row: float64 [N], the score and
    whatever else belongs to the whole sequence. counted: bool [N], False where there is no score (0 in row).
    kl, non_score_reward: as in AdvantageOutputs."""

    grid: ActionGrid
    token_grid: np.ndarray
    row: np.ndarray
    counted: np.ndarray
    kl: np.ndarray | None
    non_score_reward: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        """float64 [N]: all that the row earns."""
        values: np.ndarray = self.row + self.token_grid.sum(axis=1)
        return values

    @property
    def mask(self) -> np.ndarray:
        """bool [N, L]: the actions of the rows that are counted."""
        values: np.ndarray = self.grid.mask & self.counted[:, None]
        return values


def ppo_advantages(config: PPO, inputs: AdvantageInputs) -> AdvantageOutputs:
    """GAE on token rewards, the score on the last action.

    whiten_rewards divides all token rewards by their standard deviation and keeps their mean; the value
    targets are made before the advantages are whitened (both as in TRL).
    """
    assert inputs.batch.values is not None, "PPO needs the critic's values"
    rewards = _rewards(config, inputs)
    grid, token_rewards = rewards.grid, _with_score_on_last(rewards, rewards.row)
    if config.whiten_rewards:
        token_rewards = whiten(token_rewards, rewards.mask, shift_mean=False)
    values = grid.pad(inputs.batch.values)
    advantages, returns = gae(token_rewards, values, config.gamma, config.lam)
    if config.whiten_advantages:
        advantages = whiten(advantages, rewards.mask)
    return _outputs(rewards, advantages, np.where(rewards.counted[:, None], returns, values))


def rloo_advantages(config: RLOO, inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward to go minus the mean of the other samples' reward to go from the same position.

    Without token-level KL that is one number per row: R_i − mean of the others. whiten_rewards divides the
    rows' whole rewards by their standard deviation over the batch; normalize_advantage sets the mean to 0
    and the standard deviation to 1 over rows (over tokens, with token-level KL).
    """
    rewards = _rewards(config, inputs)
    to_go, mask = _rewards_to_go(config, rewards)
    if config.whiten_rewards:
        # Leave-one-out takes any shift away again, so only the scale of whitening is left to do.
        to_go = to_go / np.sqrt(batch_std(rewards.whole, rewards.counted) ** 2 + WHITEN_EPSILON)
    advantages = leave_one_out(to_go, inputs.batch.group_ids, rewards.counted)
    if config.normalize_advantage:
        advantages = whiten(advantages, mask)
    return _outputs(rewards, advantages)


def grpo_advantages(config: GRPO, inputs: AdvantageInputs) -> AdvantageOutputs:
    """(Reward to go − group's mean from the same position) / std of the whole rewards, by `scale`."""
    rewards = _rewards(config, inputs)
    to_go, _ = _rewards_to_go(config, rewards)
    advantages = group_normalised(to_go, inputs.batch.group_ids, config.scale, counted=rewards.counted)
    return _outputs(rewards, advantages)


BASELINES = {"none": lambda scores, _group_ids, _counted: scores, "group_mean": group_centred}


def reinforce_advantages(config: Reinforce, inputs: AdvantageInputs) -> AdvantageOutputs:
    """REINFORCE++: discounted token rewards to go, whitened over the batch's tokens.

    baseline group_mean subtracts the mean of the group from each score first (REINFORCE++-baseline).
    """
    rewards = _rewards(config, inputs)
    above_baseline = BASELINES[config.baseline](rewards.row, inputs.batch.group_ids, rewards.counted)
    token_rewards = _with_score_on_last(rewards, above_baseline)
    advantages = discounted_returns(token_rewards, config.gamma)
    if config.whiten_advantages:
        advantages = whiten(advantages, rewards.mask)
    return _outputs(rewards, advantages)


def _rewards(config: _HasKL, inputs: AdvantageInputs) -> _Rewards:
    """Scores and the divergence, the latter where `kl.place` says."""
    batch = inputs.batch
    assert inputs.scores.shape == (batch.num_rows,)
    counted = ~np.isnan(inputs.scores)
    assert np.isfinite(inputs.scores[counted]).all(), "a score is infinite"
    grid = ActionGrid.of(batch.action_mask, batch.lengths)
    kl_NL = grid.pad(_kl_of_tokens(config.kl, batch))
    kl = kl_NL.sum(axis=1)
    penalty_NL, penalty = -inputs.kl_coef * kl_NL, -inputs.kl_coef * kl
    token_NL, of_row = {
        "reward_token": (penalty_NL, np.zeros_like(penalty)),
        "reward_sequence": (np.zeros_like(penalty_NL), penalty),
        "loss": (np.zeros_like(penalty_NL), np.zeros_like(penalty)),
    }[config.kl.place]
    scores = np.where(counted, inputs.scores, 0.0).astype(np.float64)
    known_kl = None if batch.reference_logprobs is None else kl
    return _Rewards(grid, token_NL, scores + of_row, counted, known_kl, token_NL.sum(axis=1) + of_row)


def _kl_of_tokens(kl: KLConfig, batch: TokenBatch) -> np.ndarray:
    if batch.reference_logprobs is None:
        assert kl.coef == 0, "a KL penalty needs the reference's log-probabilities"
        return np.zeros(len(batch.tokens))
    if kl.estimator == "exact":
        assert batch.exact_kl is not None, "the exact divergence comes from the learner's reference pass"
        return batch.exact_kl.astype(np.float64)
    policy = batch.behaviour_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
    assert policy is not None, "a KL penalty needs the policy's log-probabilities"
    pair = [torch.from_numpy(column.astype(np.float64)) for column in (policy, batch.reference_logprobs)]
    values: np.ndarray = kl_per_token(pair[0], pair[1], kl.estimator).numpy()
    return values


def _with_score_on_last(rewards: _Rewards, row_rewards: np.ndarray) -> np.ndarray:
    values: np.ndarray = rewards.token_grid + rewards.grid.on_last(row_rewards)
    return values


def _rewards_to_go(config: _HasKL, rewards: _Rewards) -> tuple[np.ndarray, np.ndarray]:
    """What a row still earns from each action on: [N, L] with token-level KL, else [N, 1]; and its mask.

    Past its end a row keeps its score, so that a longer row finds a baseline at each of its positions.
    """
    row = rewards.row[:, None]
    if config.kl.place != "reward_token":
        return row, rewards.counted[:, None]
    return row + discounted_returns(rewards.token_grid, 1.0), rewards.mask


def _outputs(
    rewards: _Rewards, advantages_NL: np.ndarray, returns_NL: np.ndarray | None = None
) -> AdvantageOutputs:
    returns = None if returns_NL is None else rewards.grid.flatten(returns_NL)
    advantages = rewards.grid.flatten(only_counted(advantages_NL, rewards.counted))
    return AdvantageOutputs(advantages, returns, rewards.kl, rewards.non_score_reward)
