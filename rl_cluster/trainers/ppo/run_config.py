"""A PPOConfig and where a run's files are in, the RunConfig that says the same out; pure.

Every setting is checked here under the name that its user knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.config.reading.load import parse_config, with_settings
from rl_cluster.config.reward import ScorerConfig
from rl_cluster.config.run import RunConfig
from rl_cluster.trainers.fields import Elsewhere, Table, read_settings, settings_by
from rl_cluster.trainers.ppo.checks import (
    check_ppo_config,
    device_of,
    kl_config,
    num_mini_batches,
    prompt_limit,
)
from rl_cluster.trainers.ppo.config import PPOConfig

MAX_EVAL_PROMPTS = 1000
EARLY_STOPPING_FACTOR = 1.5
"""TRL stops an iteration at 1.5 × target_kl."""


@dataclass(frozen=True)
class RunPlace:
    """What a run is made of besides its settings.

    run_dir None: not decided yet. model_path, prompts_path, eval_path, reference_path: files and folders.
    max_positions: of the model, None where unknown. temperature, stop: an environment's own wish, if any.
    """

    run_dir: str | None
    model_path: str
    prompts_path: str
    scorer: ScorerConfig
    backend: Literal["local", "ray"]
    max_positions: int | None = None
    eval_path: str | None = None
    reference_path: str | None = None
    environment: EnvironmentConfig | None = None
    temperature: float | None = None
    stop: Sequence[str] = ()


_KL = ("algorithm.kl", lambda config, _: kl_config(config).model_dump())
_STOP = (
    "algorithm.stop_at_approx_kl",
    lambda config, _: EARLY_STOPPING_FACTOR * config.target_kl if config.early_stopping else None,
)


def _tokens_per_micro_batch(config: PPOConfig, place: RunPlace) -> int:
    return config.mini_batch_size * (prompt_limit(config, place.max_positions) + config.max_new_tokens)


PPO: Table = {
    "model_name": Elsewhere("model.path, where the trainer is given no model"),
    "learning_rate": "optimizer.learning_rate",
    "batch_size": "batch.prompts_per_step",
    "mini_batch_size": ("batch.tokens_per_micro_batch", _tokens_per_micro_batch),
    "gradient_accumulation_steps": ("algorithm.num_mini_batches", lambda config, _: num_mini_batches(config)),
    "ppo_epochs": "algorithm.num_epochs",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "clip_ratio": "algorithm.loss.clip_low algorithm.loss.clip_high",
    "value_clip": "algorithm.critic.clip_value",
    "max_grad_norm": "optimizer.max_grad_norm",
    **dict.fromkeys(("kl_penalty_coef", "kl_target", "kl_horizon", "kl_penalty", "adap_kl_ctrl"), _KL),
    **dict.fromkeys(("init_kl_coef", "target", "horizon"), _KL),
    "entropy_coef": "algorithm.loss.entropy_coef",
    "value_coef": "algorithm.critic.value_coef",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature eval.temperature",
    "top_p": "eval.top_p",
    "num_iterations": "run.steps",
    "save_every": "checkpoint.every",
    "eval_every": ("eval.every", lambda config, place: config.eval_every if place.eval_path else 0),
    "device": ("cluster.device", lambda config, _: device_of(config)),
    "epochs": Elsewhere("a loop of the caller's own"),
    "samples_per_prompt": "batch.samples_per_prompt",
    "max_prompt_length": (
        "data.max_prompt_tokens",
        lambda config, place: prompt_limit(config, place.max_positions),
    ),
    "learning_rate_schedule": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_steps",
    "critic_warmup_steps": "algorithm.critic.warmup_steps",
    "separate_critic": "algorithm.critic.separate",
    "early_stopping": _STOP,
    "target_kl": _STOP,
    "whiten_rewards": "algorithm.whiten_rewards",
    "whiten_advantages": "algorithm.whiten_advantages",
    "missing_eos_penalty": "rewards.shaping.missing_eos_penalty",
    "length_penalty": "rewards.shaping.length_penalty",
    "normalize_rewards": "rewards.shaping.normalize",
    "reward_clip": "rewards.shaping.clip",
    "reward_timeout_seconds": Elsewhere("rewards.scorers.0.timeout_seconds"),
    "bf16": ("model.dtype", lambda config, _: "bfloat16" if config.bf16 else "float32"),
    "gradient_checkpointing": "model.gradient_checkpointing",
    "seed": "run.seed",
    "backend": ("cluster.backend", lambda _, place: place.backend),
    "cluster": Elsewhere("the Ray cluster to connect to"),
    "output_dir": ("run.dir", lambda _, place: place.run_dir),
    "tensorboard": "log.tensorboard",
    "progress": "log.progress",
    "settings": Elsewhere("anything by its dotted name"),
}
"""Field of PPOConfig -> what it sets in the RunConfig."""


def ppo_run_config(config: PPOConfig, place: RunPlace) -> RunConfig:
    """Raises BadInputError that names the PPOConfig field."""
    check_ppo_config(config)
    fixed: dict[str, Any] = {
        "run.name": "ppo",
        "model.path": place.model_path,
        "model.reference_path": place.reference_path,
        "data.train": {"source": "jsonl", "path": place.prompts_path, "eval_path": place.eval_path},
        "data.held_out": 0,
        "rewards.scorers": [place.scorer.model_dump(mode="json", by_alias=True)],
        "rollout.stop": list(place.stop),
        "algorithm.name": "ppo",
        "eval.num_prompts": MAX_EVAL_PROMPTS,
        "checkpoint.minutes": 10.0 if config.save_every else 0.0,
        "log.samples_every": 0,
        "log.trajectories": False,
    }
    if place.temperature:
        fixed["rollout.temperature"] = place.temperature
    if place.environment is not None:
        fixed["rollout.environment"] = place.environment.model_dump(mode="json", by_alias=True)
    settings = settings_by(PPO, config, place) | fixed
    given = read_settings(config.settings, "PPOConfig.")
    data = with_settings(with_settings({}, settings), given, "PPOConfig.")
    return parse_config(data, "PPOConfig.settings" if given else "PPOConfig")
