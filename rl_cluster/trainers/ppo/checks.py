"""A PPOConfig in; BadInputError for what no run could have, and settings that need more than a name out."""

from __future__ import annotations

from typing import Literal

from rl_cluster.checks import check_number, check_whole_number
from rl_cluster.config.algorithm import KLConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.arguments import check_cluster
from rl_cluster.trainers.defaults import is_given
from rl_cluster.trainers.ppo.config import PPOConfig

LONGEST_PROMPT = 512
"""Tokens, unless max_prompt_length says otherwise."""
Estimator = Literal["k1", "k2", "abs", "exact"]
ESTIMATORS: dict[str, Estimator] = {"kl": "k1", "mse": "k2", "abs": "abs", "full": "exact"}

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
AT_LEAST = {
    "kl_penalty_coef": 0.0,
    "init_kl_coef": 0.0,
    "kl_horizon": 1.0,
    "horizon": 1.0,
    "entropy_coef": 0.0,
    "value_coef": 0.0,
    "length_penalty": 0.0,
    "gamma": 0.0,
    "lam": 0.0,
}
AT_MOST_ONE = ("gamma", "lam", "clip_ratio", "top_p")
SWITCH = (True, False)
CHOICES: dict[str, tuple[object, ...]] = {
    "learning_rate_schedule": ("constant", "linear", "cosine"),
    "normalize_rewards": ("none", "batch", "running"),
    "backend": ("auto", "local", "ray"),
    "progress": ("auto", "rich", "plain", "none"),
    "adap_kl_ctrl": (None, True, False),
    "separate_critic": SWITCH,
    "early_stopping": SWITCH,
    "whiten_rewards": SWITCH,
    "whiten_advantages": SWITCH,
    "bf16": SWITCH,
    "gradient_checkpointing": SWITCH,
    "tensorboard": SWITCH,
}


def check_ppo_config(config: PPOConfig) -> None:
    """BadInputError for a value that no run could have."""
    if not isinstance(config, PPOConfig):
        raise BadInputError(f"config={config!r:.60}: give a PPOConfig, not {type(config).__name__}.")
    _check_numbers(config)
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            options = ", ".join(map(str, choices))
            raise BadInputError(f"PPOConfig.{name}={getattr(config, name)!r}: must be one of {options}.")
    kl_config(config)
    device_of(config)
    check_cluster("PPOConfig", config.cluster, config.backend, config.settings)
    num_mini_batches(config)


def _check_numbers(config: PPOConfig) -> None:
    for name, least in WHOLE.items():
        check_whole_number(f"PPOConfig.{name}", getattr(config, name), at_least=least)
    if config.max_prompt_length is not None:
        check_whole_number("PPOConfig.max_prompt_length", config.max_prompt_length)
    for name in POSITIVE:
        check_number(f"PPOConfig.{name}", getattr(config, name), above=0.0)
    for name, floor in AT_LEAST.items():
        check_number(f"PPOConfig.{name}", getattr(config, name), at_least=floor)
    if config.missing_eos_penalty is not None:
        check_number("PPOConfig.missing_eos_penalty", config.missing_eos_penalty, at_least=0.0)
    if config.reward_clip is not None:
        check_number("PPOConfig.reward_clip", config.reward_clip, above=0.0)
    for name in AT_MOST_ONE:
        if getattr(config, name) > 1:
            raise BadInputError(f"PPOConfig.{name}={getattr(config, name)!r}: must be at most 1.")


def kl_config(config: PPOConfig) -> KLConfig:
    """AutoTrain's names count where they are given; TRL's, once any of TRL's is given; else AutoTrain's.

    TRL's `kl_penalty` or `adap_kl_ctrl` given alone bring TRL's defaults 0.2, 6 and 10,000 with them.
    """
    pairs = (("kl_penalty_coef", "init_kl_coef"), ("kl_target", "target"), ("kl_horizon", "horizon"))
    in_trl = config.kl_penalty is not None or config.adap_kl_ctrl is not None
    in_trl = in_trl or any(is_given(getattr(config, trl)) for _, trl in pairs)
    values = []
    for own, trl in pairs:
        ours, trls = getattr(config, own), getattr(config, trl)
        if is_given(ours) and is_given(trls) and ours != trls:
            raise BadInputError(
                f"PPOConfig.{own}={ours!r}, {trl}={trls!r}: they are two names of one setting. Give one of "
                "them."
            )
        values.append(float(ours if is_given(ours) or not in_trl else trls))
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


def estimator_of(config: PPOConfig) -> Estimator:
    kind = config.kl_penalty or "kl"
    if kind not in ESTIMATORS:
        raise BadInputError(f'PPOConfig.kl_penalty={kind!r}: must be one of "kl", "abs", "mse", "full".')
    return ESTIMATORS[kind]


def num_mini_batches(config: PPOConfig) -> int:
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
            f"PPOConfig.max_new_tokens={config.max_new_tokens}: the model has {max_positions} positions, "
            "which leaves none for a prompt. Lower it."
        )
    asked = config.max_prompt_length
    if asked is not None and room is not None and asked > room:
        raise BadInputError(
            f"PPOConfig.max_prompt_length={asked}: with max_new_tokens={config.max_new_tokens} it exceeds "
            f"the model's {max_positions} positions. Give at most {room}."
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
