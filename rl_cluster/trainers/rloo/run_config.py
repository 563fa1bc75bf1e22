"""An RLOOConfig and the size of the data in, the RunConfig that says the same out; pure.

Every setting is checked here under the name that its user knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_cluster.checks import check_number, check_whole_number
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.arguments import (
    Counts,
    argument_sections,
    build_config,
    check_arguments,
    check_backend,
    check_cluster,
    read_settings,
)
from rl_cluster.trainers.rloo.config import RLOOConfig

OWN_FIELDS = {
    "total_episodes": "run.steps",
    "exp_name": "run.name",
    "sft_model_path": "model.path, where no policy is given",
    "reward_model_path": "a reward_model scorer, where no reward_model is given",
    "num_ppo_epochs": "algorithm.num_epochs",
    "num_mini_batches": "algorithm.num_mini_batches, and the size of a batch",
    "local_rollout_forward_batch_size": "rollout.max_concurrent_sequences",
    "num_sample_generations": "log.samples_every",
    "response_length": "rollout.max_new_tokens",
    "stop_token": "rollout.stop_token_ids",
    "stop_token_id": "rollout.stop_token_ids",
    "temperature": "rollout.temperature",
    "missing_eos_penalty": "rewards.shaping.missing_eos_penalty",
    "whiten_rewards": "algorithm.whiten_rewards",
    "kl_coef": "algorithm.kl.coef",
    "cliprange": "algorithm.loss.clip_low and clip_high",
    "rloo_k": "batch.samples_per_prompt",
    "normalize_reward": "rewards.shaping.normalize",
    "reward_clip_range": "rewards.shaping.clip",
    "normalize_advantage": "algorithm.normalize_advantage",
    "token_level_kl": "algorithm.kl.place",
    "warmup_ratio": "optimizer.warmup_steps",
    "overwrite_output_dir": "an earlier run in output_dir is deleted",
    "world_size": "learner.num_ranks",
    "num_total_batches": "run.steps",
    "micro_batch_size": "derived",
    "local_batch_size": "derived",
    "batch_size": "derived: batch.prompts_per_step × samples_per_prompt",
    "local_mini_batch_size": "derived",
    "mini_batch_size": "derived",
    "backend": "cluster.backend",
    "cluster": "the Ray cluster to connect to",
    "progress": "log.progress",
    "settings": "anything by its dotted name",
}
"""Field of RLOOConfig that TrainingArguments has not -> what it sets in the RunConfig."""

WHOLE = ("num_ppo_epochs", "num_mini_batches", "response_length", "local_rollout_forward_batch_size")
SWITCHES = ("whiten_rewards", "normalize_reward", "normalize_advantage", "token_level_kl")


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
    check_arguments(config)
    _check_numbers(config)
    _check_stops(config)
    for name in SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise BadInputError(f"RLOOConfig.{name}={getattr(config, name)!r}: must be True or False.")
    check_backend("RLOOConfig", config.backend)
    check_cluster("RLOOConfig", config.cluster, config.backend, read_settings(config.settings))
    if config.total_episodes is not None and config.max_steps > 0:
        raise BadInputError("RLOOConfig.total_episodes and max_steps are both given: give one.")
    if config.warmup_ratio and config.warmup_steps:
        raise BadInputError("RLOOConfig.warmup_ratio and warmup_steps are both given: give one.")


def _check_numbers(config: RLOOConfig) -> None:
    for name in WHOLE:
        check_whole_number(f"RLOOConfig.{name}", getattr(config, name))
    check_whole_number("RLOOConfig.num_sample_generations", config.num_sample_generations, at_least=0)
    if config.total_episodes is not None:
        check_whole_number("RLOOConfig.total_episodes", config.total_episodes)
    if not isinstance(config.rloo_k, int) or config.rloo_k < 2:
        raise BadInputError(
            f"RLOOConfig.rloo_k={config.rloo_k!r}: the baseline of a completion is the mean of the others of "
            "its prompt, so at least 2 are needed."
        )
    for name in ("temperature", "cliprange", "reward_clip_range"):
        check_number(f"RLOOConfig.{name}", getattr(config, name), above=0.0)
    if config.cliprange > 1:
        raise BadInputError(f"RLOOConfig.cliprange={config.cliprange!r}: must be at most 1.")
    for name in ("kl_coef", "warmup_ratio"):
        check_number(f"RLOOConfig.{name}", getattr(config, name), at_least=0.0)
    if config.missing_eos_penalty is not None:
        check_number("RLOOConfig.missing_eos_penalty", config.missing_eos_penalty, at_least=0.0)


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


def rloo_run_config(config: RLOOConfig, data: Data, batches: Batches) -> RunConfig:
    """The whole run, except where the models and prompts will lie. One loop step is one batch of TRL's."""
    updates = config.num_ppo_epochs * config.num_mini_batches
    prompts_per_step = batches.batch_size // config.rloo_k
    counts = Counts(batches.num_total_batches, updates, data.num_train / prompts_per_step)
    # TRL counts logging, saving and evaluating in batches.
    sections = argument_sections(config, Counts(counts.steps, 1, counts.steps_per_epoch))
    sections["optimizer"]["warmup_steps"] = _warmup_updates(config, counts)
    sections["run"]["name"] = config.run_name or config.exp_name
    sections["learner"] = {"num_ranks": batches.world_size}
    sections["log"]["progress"] = "none" if config.disable_tqdm else config.progress
    tables = config.num_sample_generations
    sections["log"]["samples_every"] = max(1, counts.steps // tables) if tables else 0
    sections["eval"] |= {"num_prompts": max(1, data.num_eval), "temperature": 0.0}
    sections["data"] = {
        "train": {"source": "jsonl", "path": "start/prompts.jsonl"},
        "held_out": 0,
        "max_prompt_tokens": data.max_prompt_tokens,
    }
    sections["batch"] = {
        "prompts_per_step": prompts_per_step,
        "samples_per_prompt": config.rloo_k,
        "tokens_per_micro_batch": config.per_device_train_batch_size
        * (data.max_prompt_tokens + config.response_length),
    }
    sections["rollout"] = {
        "temperature": config.temperature,
        "max_new_tokens": config.response_length,
        "stop_token_ids": _stop_token_ids(config, data.eos_token_id),
        "max_concurrent_sequences": config.local_rollout_forward_batch_size,
    }
    sections["rewards"] = {
        "scorers": list(data.scorers),
        "on_failure": "drop",
        "max_failure_fraction": 0.0,
        "shaping": {
            "missing_eos_penalty": config.missing_eos_penalty,
            "normalize": "batch" if config.normalize_reward else "none",
            "clip": config.reward_clip_range if config.normalize_reward else None,
        },
    }
    sections["algorithm"] = rloo_algorithm(config)
    return build_config(sections, config.settings)


def rloo_algorithm(config: RLOOConfig) -> dict[str, Any]:
    """The section `algorithm`, as plain data. One ratio per completion, also under token_level_kl."""
    return {
        "name": "rloo",
        "num_epochs": config.num_ppo_epochs,
        "num_mini_batches": config.num_mini_batches,
        "whiten_rewards": config.whiten_rewards,
        "normalize_advantage": config.normalize_advantage,
        "kl": {
            "coef": config.kl_coef,
            "place": "reward_token" if config.token_level_kl else "reward_sequence",
            "estimator": "k1",
        },
        "loss": {
            "kind": "clip",
            "ratio": "sequence",
            "aggregation": "sequence_mean",
            "clip_low": config.cliprange,
            "clip_high": config.cliprange,
        },
    }


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
