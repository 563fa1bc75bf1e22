"""A PPOConfig in; BadInputError for what no run could have, and settings that need more than a name out."""

from __future__ import annotations

from typing import Literal

from rl_cluster.config.algorithm import KLConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.defaults import is_given
from rl_cluster.trainers.fields import (
    COUNT,
    COUNT_OR_0,
    COUNT_OR_NONE,
    NOT_NEGATIVE,
    NOT_NEGATIVE_OR_NONE,
    POSITIVE,
    POSITIVE_OR_NONE,
    Range,
    check_cluster,
    check_fields,
    read_settings,
)
from rl_cluster.trainers.ppo.config import PPOConfig

LONGEST_PROMPT = 512
"""Tokens, unless max_prompt_length says otherwise."""
Estimator = Literal["k1", "k2", "abs", "exact"]
ESTIMATORS: dict[str, Estimator] = {"kl": "k1", "mse": "k2", "abs": "abs", "full": "exact"}

RANGES = {
    COUNT: "batch_size mini_batch_size gradient_accumulation_steps ppo_epochs max_new_tokens num_iterations "
    "samples_per_prompt",
    COUNT_OR_0: "save_every eval_every epochs warmup_steps critic_warmup_steps seed",
    COUNT_OR_NONE: "max_prompt_length",
    POSITIVE: "learning_rate value_clip max_grad_norm kl_target target temperature target_kl "
    "reward_timeout_seconds",
    POSITIVE_OR_NONE: "reward_clip",
    NOT_NEGATIVE: "kl_penalty_coef init_kl_coef entropy_coef value_coef length_penalty",
    NOT_NEGATIVE_OR_NONE: "missing_eos_penalty",
    Range(at_least=1.0): "kl_horizon horizon",
    Range(at_least=0.0, at_most=1.0): "gamma lam",
    Range(above=0.0, at_most=1.0): "clip_ratio top_p",
}
SWITCHES = (
    "separate_critic early_stopping whiten_rewards whiten_advantages bf16 gradient_checkpointing tensorboard"
)
CHOICES: dict[str, tuple[object, ...]] = {
    "learning_rate_schedule": ("constant", "linear", "cosine"),
    "normalize_rewards": ("none", "batch", "running"),
    "backend": ("auto", "local", "ray"),
    "progress": ("auto", "rich", "plain", "none"),
    "adap_kl_ctrl": (None, True, False),
    **dict.fromkeys(SWITCHES.split(), (True, False)),
}


def check_ppo_config(config: PPOConfig) -> None:
    """BadInputError for a value that no run could have."""
    if not isinstance(config, PPOConfig):
        raise BadInputError(f"config={config!r:.60}: give a PPOConfig, not {type(config).__name__}.")
    check_fields(config, RANGES, CHOICES)
    kl_config(config)
    device_of(config)
    check_cluster("PPOConfig", config.cluster, config.backend, read_settings(config.settings, "PPOConfig."))
    num_mini_batches(config)


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
    names: dict[str, Literal["auto", "cpu", "cuda"]]
    names = {"None": "auto", "auto": "auto", "cpu": "cpu", "cuda": "cuda", "cuda:0": "cuda"}
    name = str(config.device)
    if name not in names:
        raise BadInputError(f'PPOConfig.device={config.device!r}: must be None, "cpu" or "cuda".')
    return names[name]
