"""A GRPOConfig and the size of the data in, the RunConfig that says the same out; pure.

Every setting is checked here under the name that its user knows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_cluster.checks import check_number, check_whole_number
from rl_cluster.config.algorithm import CISPO_GREATEST_WEIGHT
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.argument_checks import check_online
from rl_cluster.trainers.arguments import ONLINE, Counts, num_steps, online_config, warmup
from rl_cluster.trainers.fields import (
    COUNT,
    COUNT_OR_NONE,
    NOT_NEGATIVE,
    POSITIVE,
    Elsewhere,
    Table,
    check_fields,
    read_settings,
)
from rl_cluster.trainers.grpo.config import GRPOConfig

LOSS_TYPES = {
    "grpo": ("clip", "sequence_mean"),
    "bnpo": ("clip", "token_mean"),
    "dr_grpo": ("clip", "constant"),
    "dapo": ("clip", "token_mean"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
}
"""loss_type -> (kind of the loss, aggregation). bnpo divides by the tokens of a micro-batch in TRL; here, as
dapo, by those of the update, so that micro-batches cannot change it."""

RATIOS = {"token": "token", "sequence": "sequence_mean"}
SCALES = {"group": "group", "batch": "batch", "none": "none", "true": "group", "false": "none"}
"""Also True and False, as before TRL had names for them."""


RANGES = {
    COUNT: "max_completion_length num_iterations",
    COUNT_OR_NONE: "max_prompt_length num_generations_eval num_completions_to_print",
    POSITIVE: "temperature sapo_temperature_neg sapo_temperature_pos",
    NOT_NEGATIVE: "beta epsilon",
}
_WHOLE = "the importance ratios are about the whole distribution, not a part of it"
OWN_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "top_p": ((1.0,), _WHOLE),
    "top_k": ((0, -1, None), _WHOLE),
    "min_p": ((None, 0.0), _WHOLE),
    "repetition_penalty": ((1.0,), _WHOLE),
    "delta": ((None,), "lower epsilon_high, or take loss_type='sapo'"),
    "top_entropy_quantile": ((1.0,), "all tokens of a completion train"),
    "multi_objective_aggregation": (("sum_then_normalize",), "weigh the rewards with reward_weights"),
    "sync_ref_model": ((False,), "the reference stays as it is; start again from the exported model"),
    "ref_model_mixup_alpha": ((0.6,), "it belongs to sync_ref_model; the reference stays as it is"),
    "ref_model_sync_steps": ((512,), "it belongs to sync_ref_model; the reference stays as it is"),
}


@dataclass(frozen=True)
class Generation:
    """size: completions of a generation batch. mini_batches: updates per pass over it. ranks: learner's."""

    size: int
    mini_batches: int
    ranks: int


@dataclass(frozen=True)
class Data:
    """As in rloo_run_config. lora: the section model.lora, or None."""

    num_train: int
    num_eval: int
    max_prompt_tokens: int
    scorers: Sequence[Mapping[str, Any]]
    lora: Mapping[str, Any] | None = None


def check_grpo_config(config: GRPOConfig) -> None:
    """BadInputError for a value that no run could have."""
    if not isinstance(config, GRPOConfig):
        raise BadInputError(f"args={config!r:.60}: give a GRPOConfig, not {type(config).__name__}.")
    check_online(config)
    for name, (neutral, remedy) in OWN_REFUSED.items():
        if getattr(config, name) not in neutral:
            raise BadInputError(f"GRPOConfig.{name}={getattr(config, name)!r}: not here; {remedy}.")
    check_fields(config, RANGES, {})
    if not isinstance(config.num_generations, int) or config.num_generations < 2:
        raise BadInputError(
            f"GRPOConfig.num_generations={config.num_generations!r}: completions are compared with the "
            "others of their prompt, so at least 2 are needed."
        )
    if config.use_vllm and read_settings(config.settings).get("cluster.backend", config.backend) == "local":
        raise BadInputError(
            'GRPOConfig.use_vllm=True: backend="local" samples with the learner\'s own model. Leave use_vllm '
            'out, or set backend="ray".'
        )
    _check_choices(config)
    _clip(config)


def _check_choices(config: GRPOConfig) -> None:
    choices: dict[str, Mapping[str, Any]] = {
        "loss_type": LOSS_TYPES,
        "importance_sampling_level": RATIOS,
        "scale_rewards": SCALES,
    }
    for name, known in choices.items():
        value = getattr(config, name)
        if (str(value).lower() if name == "scale_rewards" else str(value)) not in known:
            raise BadInputError(f"GRPOConfig.{name}={value!r}: must be one of {', '.join(known)}.")


def generation_of(config: GRPOConfig) -> Generation:
    """TRL's arithmetic of batch sizes. BadInputError where sizes do not divide."""
    ranks = int(read_settings(config.settings).get("learner.num_ranks", 1))
    micro = config.per_device_train_batch_size * ranks
    accumulation = config.gradient_accumulation_steps
    if config.generation_batch_size is not None and config.steps_per_generation is not None:
        raise BadInputError("GRPOConfig.generation_batch_size and steps_per_generation: give one of them.")
    steps = config.steps_per_generation or accumulation
    if config.generation_batch_size is not None:
        check_whole_number("GRPOConfig.generation_batch_size", config.generation_batch_size)
        if config.generation_batch_size % micro:
            raise BadInputError(
                f"GRPOConfig.generation_batch_size={config.generation_batch_size}: is not a multiple of "
                f"per_device_train_batch_size × ranks = {micro}."
            )
        steps = config.generation_batch_size // micro
    check_whole_number("GRPOConfig.steps_per_generation", steps)
    if max(steps, accumulation) % min(steps, accumulation):
        raise BadInputError(
            f"GRPOConfig.steps_per_generation={steps}: is neither a multiple nor a divisor of "
            f"gradient_accumulation_steps={accumulation}, so updates would straddle generations."
        )
    # Several generations within one update are one: the weights do not change between them.
    size = micro * max(steps, accumulation)
    if size % config.num_generations:
        raise BadInputError(
            f"GRPOConfig.num_generations={config.num_generations}: does not divide the {size} completions of "
            f"a generation batch (per_device_train_batch_size {config.per_device_train_batch_size} × {ranks} "
            f"ranks × {max(steps, accumulation)} steps). Change one of them."
        )
    return Generation(size, max(steps // accumulation, 1), ranks)


def counts_of(config: GRPOConfig, num_prompts: int, generation: Generation) -> Counts:
    """Steps of the loop: generation batches."""
    prompts = generation.size // config.num_generations
    return num_steps(config, num_prompts, prompts, config.num_iterations * generation.mini_batches)


def _clip(config: GRPOConfig) -> tuple[float, float]:
    """How far below and above 1 the ratio may go. For cispo epsilon_high is the bound itself, as in TRL, and
    there is none below."""
    if config.loss_type == "cispo":
        greatest = CISPO_GREATEST_WEIGHT if config.epsilon_high is None else config.epsilon_high
        check_number("GRPOConfig.epsilon_high", greatest, above=0.0)
        if greatest <= 1:
            raise BadInputError(
                f"GRPOConfig.epsilon_high={config.epsilon_high!r}: with loss_type='cispo' it is the greatest "
                "weight of a token, and must be above 1; 5.0 is usual."
            )
        return 1.0, greatest - 1.0
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    check_number("GRPOConfig.epsilon_high", high, above=0.0)
    if config.epsilon > 1:
        raise BadInputError(f"GRPOConfig.epsilon={config.epsilon!r}: must be at most 1.")
    return config.epsilon, high


def _mapping(name: str, value: Any, known: set[str]) -> dict[str, Any]:
    """A dict, or one as JSON text, with known keys only."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise BadInputError(f"GRPOConfig.{name}={value!r:.60}: not JSON ({error}).") from error
    if not isinstance(given, Mapping | None) or set(given or {}) - known:
        raise BadInputError(f"GRPOConfig.{name}={value!r:.60}: may hold {', '.join(sorted(known))}.")
    return dict(given or {})


@dataclass(frozen=True)
class _Facts:
    data: Data
    generation: Generation
    counts: Counts


def _samples_every(config: GRPOConfig, facts: _Facts) -> int:
    every = config.logging_steps if config.logging_steps >= 1 else 1
    return max(1, int(every // facts.counts.updates_per_step)) if config.log_completions else 0


def _init_kwargs(config: GRPOConfig) -> dict[str, Any]:
    return _mapping(
        "model_init_kwargs", config.model_init_kwargs, {"trust_remote_code", "dtype", "torch_dtype"}
    )


def _dtype(config: GRPOConfig) -> str:
    kwargs = _init_kwargs(config)
    dtype = str(kwargs.get("dtype", kwargs.get("torch_dtype", ""))).removeprefix("torch.")
    if dtype not in ("", "float32", "bfloat16"):
        raise BadInputError(f"GRPOConfig.model_init_kwargs: dtype={dtype!r}: must be float32 or bfloat16.")
    return "bfloat16" if config.bf16 or dtype == "bfloat16" else "float32"


def _warmup(config: GRPOConfig, facts: _Facts) -> int:
    if config.warmup_ratio:
        return math.ceil(config.warmup_ratio * facts.counts.updates)
    return warmup(config, facts.counts.updates)


def _stops(config: GRPOConfig) -> dict[str, Any]:
    given = _mapping("generation_kwargs", config.generation_kwargs, {"stop", "stop_token_ids"})
    stop, ids = given.get("stop", ()), given.get("stop_token_ids", ())
    return {"stop": [stop] if isinstance(stop, str) else list(stop), "stop_token_ids": list(ids)}


GRPO: Table = {
    **ONLINE,
    "num_generations": "batch.samples_per_prompt",
    "num_generations_eval": (
        "eval.samples_per_prompt",
        lambda config, _: config.num_generations_eval or config.num_generations,
    ),
    "max_prompt_length": Elsewhere("longer prompts are refused (TRL cut them)"),
    "max_completion_length": "rollout.max_new_tokens",
    "generation_batch_size": (
        "batch.prompts_per_step",
        lambda config, facts: facts.generation.size // config.num_generations,
    ),
    "steps_per_generation": ("algorithm.num_mini_batches", lambda _, facts: facts.generation.mini_batches),
    "num_iterations": "algorithm.num_epochs",
    "shuffle_dataset": "data.shuffle",
    "model_init_kwargs": {
        "model.dtype": lambda config, _: _dtype(config),
        "model.trust_remote_code": lambda config, _: bool(_init_kwargs(config).get("trust_remote_code")),
    },
    "disable_dropout": "model.disable_dropout",
    "temperature": "rollout.temperature eval.temperature",
    "generation_kwargs": {
        "rollout.stop": lambda config, _: _stops(config)["stop"],
        "rollout.stop_token_ids": lambda config, _: _stops(config)["stop_token_ids"],
    },
    "beta": "algorithm.kl.coef",
    "epsilon": ("algorithm.loss.clip_low", lambda config, _: _clip(config)[0]),
    "epsilon_high": ("algorithm.loss.clip_high", lambda config, _: _clip(config)[1]),
    "loss_type": {
        "algorithm.loss.kind": lambda config, _: LOSS_TYPES[config.loss_type][0],
        "algorithm.loss.aggregation": lambda config, _: LOSS_TYPES[config.loss_type][1],
    },
    "sapo_temperature_neg": "algorithm.loss.temperature_negative",
    "sapo_temperature_pos": "algorithm.loss.temperature_positive",
    "importance_sampling_level": (
        "algorithm.loss.ratio",
        lambda config, _: RATIOS[config.importance_sampling_level],
    ),
    "scale_rewards": ("algorithm.scale", lambda config, _: SCALES[str(config.scale_rewards).lower()]),
    "reward_weights": Elsewhere("rewards.scorers.*.weight"),
    "mask_truncated_completions": "algorithm.loss.mask_truncated",
    "log_completions": ("log.samples_every", _samples_every),
    "num_completions_to_print": ("log.num_samples", lambda config, _: config.num_completions_to_print or 5),
    "use_vllm": Elsewhere("cluster.backend: ray, where the backend is left open"),
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_fraction",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "warmup_ratio": ("optimizer.warmup_steps", _warmup),
}
"""Field of GRPOConfig that TrainingArguments has not -> what it sets in the RunConfig."""


def grpo_run_config(config: GRPOConfig, data: Data, generation: Generation, counts: Counts) -> RunConfig:
    """The whole run, except where the models and prompts will lie. One loop step is one generation batch."""
    longest = data.max_prompt_tokens + config.max_completion_length
    fixed = {
        "run.name": config.run_name or "grpo",
        "model.lora": None if data.lora is None else dict(data.lora),
        "learner.num_ranks": generation.ranks,
        "eval.num_prompts": max(1, data.num_eval),
        "data.max_prompt_tokens": data.max_prompt_tokens,
        "batch.tokens_per_micro_batch": config.per_device_train_batch_size * longest,
        "rewards.scorers": list(data.scorers),
        "algorithm.name": "grpo",
        "algorithm.kl.place": "loss",
        "algorithm.kl.estimator": "k3",
    }
    return online_config(GRPO, config, _Facts(data, generation, counts), counts, fixed)
