"""An RLOOConfig and the size of the data in, the RunConfig that says the same out; pure.

Every setting is checked here under the name that its user knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_cluster.checks import check_whole_number
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.argument_checks import check_online
from rl_cluster.trainers.arguments import ONLINE, Counts, online_config
from rl_cluster.trainers.fields import (
    COUNT,
    COUNT_OR_0,
    COUNT_OR_NONE,
    NOT_NEGATIVE,
    NOT_NEGATIVE_OR_NONE,
    POSITIVE,
    Elsewhere,
    Range,
    Table,
    check_fields,
    read_settings,
)
from rl_cluster.trainers.rloo.config import RLOOConfig

RANGES = {
    COUNT: "num_ppo_epochs num_mini_batches response_length local_rollout_forward_batch_size",
    COUNT_OR_0: "num_sample_generations",
    COUNT_OR_NONE: "total_episodes",
    POSITIVE: "temperature reward_clip_range",
    Range(above=0.0, at_most=1.0): "cliprange",
    NOT_NEGATIVE: "kl_coef",
    NOT_NEGATIVE_OR_NONE: "missing_eos_penalty",
}
SWITCHES = "whiten_rewards normalize_reward normalize_advantage token_level_kl"


@dataclass(frozen=True)
class Batches:
    """Completions, per learner rank (local) and in all, under TRL's names."""

    world_size: int
    local_batch_size: int
    micro_batch_size: int
    batch_size: int
    mini_batch_size: int
    local_mini_batch_size: int
    num_total_batches: int


@dataclass(frozen=True)
class Data:
    """num_train, num_eval: prompts. max_prompt_tokens: of the longest. scorers: the section, plain data."""

    num_train: int
    num_eval: int
    max_prompt_tokens: int
    scorers: Sequence[Mapping[str, Any]]
    eos_token_id: int


def check_rloo_config(config: RLOOConfig) -> None:
    """BadInputError for a value that no run could have."""
    if not isinstance(config, RLOOConfig):
        raise BadInputError(f"config={config!r:.60}: give an RLOOConfig, not {type(config).__name__}.")
    check_online(config)
    check_fields(config, RANGES, {}, SWITCHES)
    if not isinstance(config.rloo_k, int) or config.rloo_k < 2:
        raise BadInputError(
            f"RLOOConfig.rloo_k={config.rloo_k!r}: the baseline of a completion is the mean of the others of "
            "its prompt, so at least 2 are needed."
        )
    if config.total_episodes is not None and config.max_steps > 0:
        raise BadInputError("RLOOConfig.total_episodes and max_steps are both given: give one.")
    _check_stops(config)


def _check_stops(config: RLOOConfig) -> None:
    if config.stop_token not in (None, "eos"):
        raise BadInputError(
            f'RLOOConfig.stop_token={config.stop_token!r}: must be "eos" or None; name another token with '
            "stop_token_id."
        )
    if config.stop_token is not None and config.stop_token_id is not None:
        raise BadInputError(
            "RLOOConfig.stop_token and stop_token_id are both given: they exclude each other."
        )
    if config.stop_token_id is not None:
        check_whole_number("RLOOConfig.stop_token_id", config.stop_token_id, at_least=0)


def batches_of(config: RLOOConfig, num_prompts: int) -> Batches:
    """TRL's arithmetic of batch sizes. BadInputError where rloo_k does not divide."""
    ranks = _ranks(config)
    local = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.num_mini_batches
    batch = local * ranks
    if batch % config.rloo_k:
        raise BadInputError(
            f"RLOOConfig.rloo_k={config.rloo_k}: does not divide the {batch} completions of a batch "
            f"(per_device_train_batch_size {config.per_device_train_batch_size} × "
            f"gradient_accumulation_steps {config.gradient_accumulation_steps} × num_mini_batches "
            f"{config.num_mini_batches} × {ranks} ranks). Change one of them."
        )
    episodes = config.total_episodes
    if episodes is None and config.max_steps > 0:
        # Here an update batch is what TRL's progress counts as a step.
        episodes = config.max_steps * batch
    if episodes is None:
        # As in TRL, an epoch shows every prompt once to one completion.
        episodes = math.ceil(config.num_train_epochs * num_prompts)
    return Batches(
        world_size=ranks,
        local_batch_size=local,
        micro_batch_size=config.per_device_train_batch_size * ranks,
        batch_size=batch,
        mini_batch_size=batch // config.num_mini_batches,
        local_mini_batch_size=local // config.num_mini_batches,
        num_total_batches=max(1, math.ceil(episodes / batch)),
    )


def fill_in(config: RLOOConfig, batches: Batches) -> None:
    """The derived fields; BadInputError where the user has set one to something else."""
    # A configuration may serve several trainers, and be changed between them.
    before = vars(config).get("_filled_in", {})
    config._filled_in = {name: value for name, value in vars(batches).items() if name != "world_size"}
    for name, value in vars(batches).items():
        asked = getattr(config, name)
        if asked not in (None, value, before.get(name)):
            raise BadInputError(
                f"RLOOConfig.{name}={asked!r}: follows from the other settings, which give {value}. Leave "
                "it out."
            )
        setattr(config, name, value)


def _stop_token_ids(config: RLOOConfig, eos_token_id: int) -> list[int]:
    if config.stop_token == "eos":
        return [eos_token_id]
    return [] if config.stop_token_id is None else [config.stop_token_id]


def _warmup_updates(config: RLOOConfig, counts: Counts) -> int:
    """TRL moves its schedule once per batch; ours moves at every update."""
    share = config.warmup_ratio or (config.warmup_steps if 0 < config.warmup_steps < 1 else 0.0)
    if share:
        return math.ceil(share * counts.steps * counts.updates_per_step)
    return int(config.warmup_steps) * counts.updates_per_step


def _ranks(config: RLOOConfig) -> int:
    asked = read_settings(config.settings).get("learner.num_ranks")
    if config.world_size is not None and asked not in (None, config.world_size):
        raise BadInputError(
            f"RLOOConfig.world_size={config.world_size!r}: settings['learner.num_ranks'] says {asked!r}."
        )
    return int(asked or config.world_size or 1)


@dataclass(frozen=True)
class _Facts:
    data: Data
    batches: Batches
    counts: Counts
    """Of updates."""


def _samples_every(config: RLOOConfig, facts: _Facts) -> int:
    tables = config.num_sample_generations
    return max(1, facts.counts.steps // tables) if tables else 0


def _micro_batch(config: RLOOConfig, facts: _Facts) -> int:
    size: int = config.per_device_train_batch_size
    return size * (facts.data.max_prompt_tokens + config.response_length)


_STOPS = ("rollout.stop_token_ids", lambda config, facts: _stop_token_ids(config, facts.data.eos_token_id))
_STEPS = ("run.steps", lambda _, facts: facts.batches.num_total_batches)
_WARMUP = ("optimizer.warmup_steps", lambda config, facts: _warmup_updates(config, facts.counts))
_DERIVED = Elsewhere("derived")

RLOO: Table = {
    **ONLINE,
    "exp_name": ("run.name", lambda config, _: config.run_name or config.exp_name),
    "sft_model_path": Elsewhere("model.path, where no policy is given"),
    "reward_model_path": Elsewhere("a reward_model scorer, where no reward_model is given"),
    "total_episodes": _STEPS,
    "num_ppo_epochs": "algorithm.num_epochs",
    "num_mini_batches": "algorithm.num_mini_batches",
    "local_rollout_forward_batch_size": "rollout.max_concurrent_sequences",
    "num_sample_generations": ("log.samples_every", _samples_every),
    "response_length": "rollout.max_new_tokens",
    "stop_token": _STOPS,
    "stop_token_id": _STOPS,
    "temperature": "rollout.temperature",
    "missing_eos_penalty": "rewards.shaping.missing_eos_penalty",
    "whiten_rewards": "algorithm.whiten_rewards",
    "kl_coef": "algorithm.kl.coef",
    "cliprange": "algorithm.loss.clip_low algorithm.loss.clip_high",
    "rloo_k": "batch.samples_per_prompt",
    "normalize_reward": (
        "rewards.shaping.normalize",
        lambda config, _: "batch" if config.normalize_reward else "none",
    ),
    "reward_clip_range": (
        "rewards.shaping.clip",
        lambda config, _: config.reward_clip_range if config.normalize_reward else None,
    ),
    "normalize_advantage": "algorithm.normalize_advantage",
    # One ratio per completion, also here.
    "token_level_kl": (
        "algorithm.kl.place",
        lambda config, _: "reward_token" if config.token_level_kl else "reward_sequence",
    ),
    "warmup_ratio": _WARMUP,
    "world_size": ("learner.num_ranks", lambda _, facts: facts.batches.world_size),
    "num_total_batches": _STEPS,
    "batch_size": (
        "batch.prompts_per_step",
        lambda config, facts: facts.batches.batch_size // config.rloo_k,
    ),
    "micro_batch_size": ("batch.tokens_per_micro_batch", _micro_batch),
    "local_batch_size": _DERIVED,
    "local_mini_batch_size": _DERIVED,
    "mini_batch_size": _DERIVED,
}
"""Field of RLOOConfig that TrainingArguments has not -> what it sets in the RunConfig."""


def rloo_run_config(config: RLOOConfig, data: Data, batches: Batches) -> RunConfig:
    """The whole run, except where the models and prompts will lie. One loop step is one batch of TRL's."""
    updates = config.num_ppo_epochs * config.num_mini_batches
    per_epoch = data.num_train / (batches.batch_size // config.rloo_k)
    counts = Counts(batches.num_total_batches, updates, per_epoch)
    fixed = {
        "eval.num_prompts": max(1, data.num_eval),
        "eval.temperature": 0.0,
        "data.max_prompt_tokens": data.max_prompt_tokens,
        "rewards.scorers": list(data.scorers),
        "algorithm.name": "rloo",
        "algorithm.kl.estimator": "k1",
        "algorithm.loss.kind": "clip",
        "algorithm.loss.ratio": "sequence",
        "algorithm.loss.aggregation": "sequence_mean",
    }
    # TRL counts logging, saving and evaluating in batches.
    in_batches = Counts(counts.steps, 1, per_epoch)
    return online_config(RLOO, config, _Facts(data, batches, counts), in_batches, fixed)
