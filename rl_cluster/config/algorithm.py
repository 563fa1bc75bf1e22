"""The algorithms as data: advantage, loss, KL. The functions are in rl_cluster.algorithms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rl_cluster.config.base import Config, LocalPath

Fraction = Annotated[float, Field(ge=0, le=1)]


class KLConfig(Config):
    """Divergence from the frozen reference."""

    coef: NonNegativeFloat = 0.0
    """β. At 0 no reference is loaded."""
    place: Literal["reward_token", "reward_sequence", "loss"] = "loss"
    """Subtracted from each token's reward, from the sequence's score, or added to the loss."""
    estimator: Literal["k1", "k2", "k3", "abs", "exact"] = "k3"
    """Schulman's estimators: k1 = log(π/ref), k2 = ½ log²(π/ref), k3 = ref/π − 1 − log(ref/π);
    abs = |log(π/ref)|. exact = Σ π log(π/ref) over the vocabulary; in the reward only, and every learner rank
    then holds a copy of the reference."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    target: PositiveFloat = 6.0
    """Adaptive: the sequence KL (nats) that the controller steers to."""
    horizon: PositiveInt = 10_000
    """Adaptive: time constant, in sequences."""


CISPO_GREATEST_WEIGHT = 5.0
"""Of a token in cispo, where none is given: what TRL recommends (Khatri et al. 2025, ScaleRL)."""


class PolicyLossConfig(Config):
    """The policy-gradient loss, common to all algorithms."""

    kind: Literal["clip", "cispo", "sapo", "reinforce"] = "clip"
    """clip: PPO's pessimistic clipped ratio. cispo: min(ratio, 1 + clip_high) as a detached weight of log π.
    sapo: a sigmoid of the ratio in place of the clip. reinforce: −A log π, no ratio."""
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    """token: π/π_old per token. sequence: product over the tokens (RLOO). sequence_mean: geometric
    mean (GSPO)."""
    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped to [1 − clip_low, 1 + clip_high]; DAPO's clip-higher is 0.28. cispo has no lower
    bound: there clip_low is 1, and clip_high 4 by default (weights of at most 5)."""
    temperature_positive: PositiveFloat = 1.0
    """sapo: τ where the advantage is above 0; the higher, the sooner a moved token stops to count."""
    temperature_negative: PositiveFloat = 1.05
    """sapo: τ elsewhere."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """token_mean: all tokens of the optimizer step alike (DAPO). sequence_mean: mean over tokens, then over
    sequences (GRPO). constant: sum over tokens / max_new_tokens, mean over sequences (Dr. GRPO)."""
    entropy_coef: NonNegativeFloat = 0.0
    mask_truncated: bool = False
    """Samples that hit max_new_tokens do not train (DAPO's overlong filtering): the loss is the mean over the
    others, as if those had not been drawn. TRL divides by all of them."""

    @model_validator(mode="before")
    @classmethod
    def _cispo_has_bounds_of_its_own(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("kind") == "cispo":
            return {"clip_low": 1.0, "clip_high": CISPO_GREATEST_WEIGHT - 1.0} | given
        return given


class CriticConfig(Config):
    """How the values are learned."""

    separate: bool = False
    """False: value head on the policy's trunk. True: a model of its own, which starts as the policy."""
    model: LocalPath | None = None
    """Folder of a separate critic's weights; default: the policy's."""
    learning_rate: PositiveFloat | None = None
    """Separate critic only; default: the policy's."""
    value_coef: NonNegativeFloat = 0.1
    """Weight of the value loss when the trunk is shared."""
    clip_value: PositiveFloat = 0.2
    """Values move at most so far from the old ones per step (clipped value loss)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which only the values learn: a critic of its own, or the head alone on a shared trunk, so that
    the policy stays as it is. A separate critic's schedule of the learning rate begins with the run, the
    policy's with its own first update, and both end with the run; on a shared trunk there is one."""


class _Algorithm(Config):
    num_epochs: PositiveInt = 1
    """Passes over each batch (TRL: num_ppo_epochs)."""
    num_mini_batches: PositiveInt = 1
    """Optimizer updates per pass."""
    stop_at_approx_kl: PositiveFloat | None = None
    """Leave out a step's remaining updates once the policy has moved by more than this from where the step
    began: ½ (log π − log π_old)² in nats, mean over one update as its loss weighs tokens or completions."""
    kl: KLConfig = KLConfig()
    loss: PolicyLossConfig = PolicyLossConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_up_sections(cls, given: Any) -> Any:
        """A section given in part keeps the algorithm's own defaults: RLOO's loss stays per completion when
        only its clip_high is set."""
        if not isinstance(given, dict):
            return given
        own = {name: cls.model_fields[name].default for name in ("kl", "loss")}
        sections = {name: own[name].model_dump(exclude_unset=True) | part for name, part in given.items()
                    if name in own and isinstance(part, dict)}  # fmt: skip
        return given | sections


class PPO(_Algorithm):
    """Schulman et al. 2017, token-level, with a critic and GAE."""

    name: Literal["ppo"] = "ppo"
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    critic: CriticConfig = CriticConfig()
    num_epochs: PositiveInt = 4
    kl: KLConfig = KLConfig(coef=0.05, place="reward_token", estimator="k1")


class RLOO(_Algorithm):
    """Ahmadian et al. 2024: leave-one-out baseline, the completion is one action."""

    name: Literal["rloo"] = "rloo"
    normalize_advantage: bool = False
    whiten_rewards: bool = False
    kl: KLConfig = KLConfig(coef=0.05, place="reward_sequence", estimator="k1")
    loss: PolicyLossConfig = PolicyLossConfig(ratio="sequence", aggregation="sequence_mean")


class GRPO(_Algorithm):
    """Shao et al. 2024: group-normalised scores. Dr. GRPO, DAPO, GSPO, CISPO are settings of it."""

    name: Literal["grpo"] = "grpo"
    scale: Literal["group", "batch", "none"] = "group"
    """Divide by the standard deviation of the group, of the batch, or not at all (Dr. GRPO)."""
    loss: PolicyLossConfig = PolicyLossConfig(aggregation="sequence_mean")


class Reinforce(_Algorithm):
    """REINFORCE++ (Hu 2025): token-level discounted returns, normalised over the batch."""

    name: Literal["reinforce"] = "reinforce"
    gamma: Fraction = 1.0
    baseline: Literal["none", "group_mean"] = "none"
    """group_mean: REINFORCE++-baseline."""
    whiten_advantages: bool = True
    kl: KLConfig = KLConfig(coef=0.01, place="reward_token", estimator="k1")


AlgorithmConfig = Annotated[PPO | RLOO | GRPO | Reinforce, Field(discriminator="name")]


def critic_of(algorithm: AlgorithmConfig) -> CriticConfig | None:
    """The critic's settings; an algorithm has a critic if and only if its config has the field."""
    critic = dict(algorithm).get("critic")
    assert critic is None or isinstance(critic, CriticConfig)
    return critic
