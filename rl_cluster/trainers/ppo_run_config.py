"""A PPOConfig and where a run's files are in, the RunConfig that says the same out; pure.

Every setting is checked here under the name that its user knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_cluster.checks import check_number, check_whole_number
from rl_cluster.config.algorithm import PPO, CriticConfig, KLConfig, PolicyLossConfig
from rl_cluster.config.data import DataConfig, EvalConfig, FileSource
from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.config.load import parse_as
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
from rl_cluster.trainers.ppo_config import PPOConfig

LONGEST_PROMPT = 512
"""Tokens, unless max_prompt_length says otherwise."""
MAX_EVAL_PROMPTS = 1000
EARLY_STOPPING_FACTOR = 1.5
"""TRL stops an iteration at 1.5 × target_kl."""

ESTIMATORS: dict[str, Literal["k1", "k2", "abs"]] = {"kl": "k1", "mse": "k2", "abs": "abs"}


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
        checkpoint=CheckpointConfig(every=config.save_every),
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
        num_mini_batches=_num_mini_batches(config),
        stop_at_approx_kl=EARLY_STOPPING_FACTOR * config.target_kl if config.early_stopping else None,
        kl=kl_config(config),
        loss=PolicyLossConfig(
            clip_low=config.clip_ratio, clip_high=config.clip_ratio, entropy_coef=config.entropy_coef
        ),
    )


def _shaping(config: PPOConfig) -> ShapingConfig:
    return ShapingConfig(
        missing_eos_penalty=config.missing_eos_penalty,
        length_penalty=config.length_penalty,
        normalize=config.normalize_rewards,  # type: ignore[arg-type]
        clip=config.reward_clip,
    )


def kl_config(config: PPOConfig) -> KLConfig:
    """AutoTrain's names count where they were changed; TRL's, once any of TRL's is used; else AutoTrain's.

    TRL's `kl_penalty` or `adap_kl_ctrl` given alone bring TRL's defaults 0.2, 6 and 10,000 with them.
    """
    pairs = (("kl_penalty_coef", "init_kl_coef"), ("kl_target", "target"), ("kl_horizon", "horizon"))
    in_trl = config.kl_penalty is not None or config.adap_kl_ctrl is not None
    in_trl = in_trl or any(_changed(config, trl) for _, trl in pairs)
    values = []
    for own, trl in pairs:
        if _changed(config, own) and _changed(config, trl) and getattr(config, own) != getattr(config, trl):
            raise BadInputError(
                f"PPOConfig.{own}={getattr(config, own)!r}, {trl}={getattr(config, trl)!r}: they are two names "
                "of one setting. Give one of them."
            )
        values.append(getattr(config, own if _changed(config, own) or not in_trl else trl))
    coef, target, horizon = values
    adaptive = config.adap_kl_ctrl is not False and coef > 0
    return KLConfig(
        coef=coef,
        place="reward_token",
        estimator=estimator_of(config),
        controller="adaptive" if adaptive else "fixed",
        target=target,
        horizon=int(horizon),
    )


def estimator_of(config: PPOConfig) -> Literal["k1", "k2", "abs"]:
    kind = config.kl_penalty or "kl"
    if kind == "full":
        raise BadInputError(
            'PPOConfig.kl_penalty="full": needs the probabilities of the whole vocabulary at every token, and '
            'the reference here answers with those of the drawn tokens. Use "kl", which has the same mean.'
        )
    if kind not in ESTIMATORS:
        raise BadInputError(f'PPOConfig.kl_penalty={kind!r}: must be one of "kl", "abs", "mse".')
    return ESTIMATORS[kind]


def _changed(config: PPOConfig, name: str) -> bool:
    return bool(getattr(config, name) != type(config).__dataclass_fields__[name].default)


def _num_mini_batches(config: PPOConfig) -> int:
    sequences = config.batch_size * config.samples_per_prompt
    of_update = min(config.mini_batch_size * config.gradient_accumulation_steps, sequences)
    if sequences % of_update:
        times = f" × gradient_accumulation_steps={config.gradient_accumulation_steps}"
        divisors = [d for d in range(1, sequences + 1) if sequences % d == 0]
        raise BadInputError(
            f"PPOConfig.mini_batch_size={config.mini_batch_size}{times}: does not divide the {sequences} "
            f"sequences of an iteration (batch_size × samples_per_prompt). Their product may be one of "
            f"{divisors}."
        )
    return sequences // of_update


def prompt_limit(config: PPOConfig, max_positions: int | None) -> int:
    """The longest prompt in tokens; BadInputError where max_new_tokens leaves no room for any."""
    room = None if max_positions is None else max_positions - config.max_new_tokens
    if room is not None and room < 1:
        raise BadInputError(
            f"PPOConfig.max_new_tokens={config.max_new_tokens}: the model has {max_positions} positions, which "
            "leaves none for a prompt. Lower it."
        )
    asked = config.max_prompt_length
    if asked is not None and room is not None and asked > room:
        raise BadInputError(
            f"PPOConfig.max_prompt_length={asked}: with max_new_tokens={config.max_new_tokens} it exceeds the "
            f"model's {max_positions} positions. Give at most {room}."
        )
    return asked or min(LONGEST_PROMPT, room or LONGEST_PROMPT)


def device_of(config: PPOConfig) -> Literal["auto", "cpu", "cuda"]:
    """None, "cpu", "cuda", "cuda:0" or a torch.device."""
    names: dict[str, Literal["auto", "cpu", "cuda"]] = {
        "None": "auto",
        "auto": "auto",
        "cpu": "cpu",
        "cuda": "cuda",
        "cuda:0": "cuda",
    }
    name = str(config.device)
    if name not in names:
        raise BadInputError(f'PPOConfig.device={config.device!r}: must be None, "cpu" or "cuda".')
    return names[name]


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


WHOLE = {
    "batch_size": 1,
    "mini_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "ppo_epochs": 1,
    "max_new_tokens": 1,
    "num_iterations": 1,
    "save_every": 0,
    "eval_every": 0,
    "epochs": 0,
    "samples_per_prompt": 1,
    "warmup_steps": 0,
    "critic_warmup_steps": 0,
    "seed": 0,
}
POSITIVE = (
    "learning_rate",
    "clip_ratio",
    "value_clip",
    "max_grad_norm",
    "kl_target",
    "target",
    "temperature",
    "top_p",
    "target_kl",
    "reward_timeout_seconds",
)
NOT_NEGATIVE = (
    "kl_penalty_coef",
    "init_kl_coef",
    "entropy_coef",
    "value_coef",
    "length_penalty",
    "gamma",
    "lam",
)
AT_MOST_ONE = ("gamma", "lam", "clip_ratio", "top_p")
CHOICES = {
    "learning_rate_schedule": ("constant", "linear", "cosine"),
    "normalize_rewards": ("none", "batch", "running"),
    "backend": ("auto", "local", "ray"),
    "progress": ("auto", "rich", "plain", "none"),
}
SWITCHES = (
    "separate_critic",
    "early_stopping",
    "whiten_rewards",
    "whiten_advantages",
    "bf16",
    "gradient_checkpointing",
    "tensorboard",
)


def check_ppo_config(config: PPOConfig) -> None:
    """BadInputError for a value that no run could have."""
    if not isinstance(config, PPOConfig):
        raise BadInputError(f"config={config!r:.60}: give a PPOConfig, not {type(config).__name__}.")
    for name, least in WHOLE.items():
        check_whole_number(f"PPOConfig.{name}", getattr(config, name), at_least=least)
    if config.max_prompt_length is not None:
        check_whole_number("PPOConfig.max_prompt_length", config.max_prompt_length)
    for name in POSITIVE:
        check_number(f"PPOConfig.{name}", getattr(config, name), above=0.0)
    for name in ("kl_horizon", "horizon"):
        check_number(f"PPOConfig.{name}", getattr(config, name), at_least=1.0)
    for name in NOT_NEGATIVE:
        check_number(f"PPOConfig.{name}", getattr(config, name), at_least=0.0)
    for name in ("missing_eos_penalty", "reward_clip"):
        if getattr(config, name) is not None:
            check_number(f"PPOConfig.{name}", getattr(config, name), at_least=0.0)
    for name in AT_MOST_ONE:
        if getattr(config, name) > 1:
            raise BadInputError(f"PPOConfig.{name}={getattr(config, name)!r}: must be at most 1.")
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            options = ", ".join(choices)
            raise BadInputError(f"PPOConfig.{name}={getattr(config, name)!r}: must be one of {options}.")
    for name in SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise BadInputError(f"PPOConfig.{name}={getattr(config, name)!r}: must be True or False.")
    if config.adap_kl_ctrl not in (None, True, False):
        raise BadInputError(f"PPOConfig.adap_kl_ctrl={config.adap_kl_ctrl!r}: must be True or False.")
    kl_config(config)
    device_of(config)
    _num_mini_batches(config)
