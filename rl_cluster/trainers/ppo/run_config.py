"""A PPOConfig and where a run's files are in, the RunConfig that says the same out; pure.

Every setting is checked here under the name that its user knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_cluster.config.algorithm import PPO, CriticConfig, PolicyLossConfig
from rl_cluster.config.data import DataConfig, EvalConfig, FileSource
from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.config.reading.load import parse_as
from rl_cluster.config.reward import RewardConfig, ScorerConfig, ShapingConfig
from rl_cluster.config.run import (
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    RunSection,
)
from rl_cluster.errors import BadInputError
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


def ppo_run_config(config: PPOConfig, place: RunPlace) -> RunConfig:
    """Raises BadInputError that names the PPOConfig field."""
    check_ppo_config(config)
    limit = prompt_limit(config, place.max_positions)
    run = RunConfig(
        run=RunSection(dir=place.run_dir, name="ppo", seed=config.seed, steps=config.num_iterations),
        model=ModelConfig(
            path=place.model_path,
            reference_path=place.reference_path,
            dtype="bfloat16" if config.bf16 else "float32",
            gradient_checkpointing=config.gradient_checkpointing,
        ),
        data=DataConfig(
            train=FileSource(source="jsonl", path=place.prompts_path, eval_path=place.eval_path),
            max_prompt_tokens=limit,
            held_out=0,
        ),
        rewards=RewardConfig(scorers=(place.scorer,), shaping=_shaping(config)),
        batch=BatchConfig(
            prompts_per_step=config.batch_size,
            samples_per_prompt=config.samples_per_prompt,
            tokens_per_micro_batch=config.mini_batch_size * (limit + config.max_new_tokens),
        ),
        rollout=RolloutConfig(
            temperature=place.temperature or config.temperature,
            max_new_tokens=config.max_new_tokens,
            stop=tuple(place.stop),
            environment=place.environment,
        ),
        algorithm=_algorithm(config),
        optimizer=OptimizerConfig(
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            schedule=config.learning_rate_schedule,  # type: ignore[arg-type]
            warmup_steps=config.warmup_steps,
        ),
        cluster=ClusterConfig(backend=place.backend, device=device_of(config)),
        eval=EvalConfig(
            every=config.eval_every if place.eval_path else 0,
            num_prompts=MAX_EVAL_PROMPTS,
            temperature=config.temperature,
            top_p=config.top_p,
        ),
        checkpoint=CheckpointConfig(every=config.save_every, minutes=10.0 if config.save_every else 0.0),
        log=LogConfig(
            samples_every=0,
            trajectories=False,
            tensorboard=config.tensorboard,
            progress=config.progress,  # type: ignore[arg-type]
        ),
    )
    return with_settings(run, config.settings)


def _algorithm(config: PPOConfig) -> PPO:
    return PPO(
        gamma=config.gamma,
        lam=config.lam,
        whiten_rewards=config.whiten_rewards,
        whiten_advantages=config.whiten_advantages,
        critic=CriticConfig(
            separate=config.separate_critic,
            value_coef=config.value_coef,
            clip_value=config.value_clip,
            warmup_steps=config.critic_warmup_steps,
        ),
        num_epochs=config.ppo_epochs,
        num_mini_batches=num_mini_batches(config),
        stop_at_approx_kl=EARLY_STOPPING_FACTOR * config.target_kl if config.early_stopping else None,
        kl=kl_config(config),
        loss=PolicyLossConfig(
            clip_low=float(config.clip_ratio),
            clip_high=float(config.clip_ratio),
            entropy_coef=config.entropy_coef,
        ),
    )


def _shaping(config: PPOConfig) -> ShapingConfig:
    return ShapingConfig(
        missing_eos_penalty=config.missing_eos_penalty,
        length_penalty=config.length_penalty,
        normalize=config.normalize_rewards,  # type: ignore[arg-type]
        clip=config.reward_clip,
    )


def with_settings(run: RunConfig, settings: Any) -> RunConfig:
    """run with dotted settings replaced, checked as a configuration file is."""
    if not settings:
        return run
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise BadInputError(f"PPOConfig.settings={settings!r:.60}: give a dict of dotted names and values.")
    data = run.model_dump(mode="json", by_alias=True)
    for name, value in settings.items():
        node = data
        *sections, last = name.split(".")
        for section in sections:
            if node.get(section) is None:
                node[section] = {}
            node = node[section]
            if not isinstance(node, dict):
                raise BadInputError(f"PPOConfig.settings[{name!r}]: {section!r} has no settings inside it.")
        node[last] = value
    return parse_as(RunConfig, data, "PPOConfig.settings")
