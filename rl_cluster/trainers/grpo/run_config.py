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
from rl_cluster.trainers.arguments import (
    Counts,
    argument_sections,
    build_config,
    check_arguments,
    check_backend,
    num_steps,
    read_settings,
)
from rl_cluster.trainers.grpo.config import GRPOConfig
from rl_cluster.trainers.grpo.fields import OWN_FIELDS as OWN_FIELDS
from rl_cluster.trainers.grpo.fields import OWN_REFUSED
from rl_cluster.trainers.grpo.place import check_where

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
    check_arguments(config)
    for name, (neutral, remedy) in OWN_REFUSED.items():
        if getattr(config, name) not in neutral:
            raise BadInputError(f"GRPOConfig.{name}={getattr(config, name)!r}: not here; {remedy}.")
    for name in ("max_completion_length", "num_iterations"):
        check_whole_number(f"GRPOConfig.{name}", getattr(config, name))
    for name in ("max_prompt_length", "num_generations_eval", "num_completions_to_print"):
        if getattr(config, name) is not None:
            check_whole_number(f"GRPOConfig.{name}", getattr(config, name))
    if not isinstance(config.num_generations, int) or config.num_generations < 2:
        raise BadInputError(
            f"GRPOConfig.num_generations={config.num_generations!r}: completions are compared with the "
            "others of their prompt, so at least 2 are needed."
        )
    for name in ("temperature", "sapo_temperature_neg", "sapo_temperature_pos"):
        check_number(f"GRPOConfig.{name}", getattr(config, name), above=0.0)
    for name in ("beta", "epsilon", "warmup_ratio"):
        check_number(f"GRPOConfig.{name}", getattr(config, name), at_least=0.0)
    check_backend("GRPOConfig", config.backend)
    check_where(config)
    if config.warmup_ratio and config.warmup_steps:
        raise BadInputError("GRPOConfig.warmup_ratio and warmup_steps are both given: give one.")
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


def grpo_run_config(config: GRPOConfig, data: Data, generation: Generation, counts: Counts) -> RunConfig:
    """The whole run, except where the models and prompts will lie. One loop step is one generation batch."""
    sections = argument_sections(config, counts)
    kwargs = _mapping(
        "model_init_kwargs", config.model_init_kwargs, {"trust_remote_code", "dtype", "torch_dtype"}
    )
    stops = _mapping("generation_kwargs", config.generation_kwargs, {"stop", "stop_token_ids"})
    if config.warmup_ratio:
        sections["optimizer"]["warmup_steps"] = math.ceil(config.warmup_ratio * counts.updates)
    sections["run"]["name"] = config.run_name or "grpo"
    dtype = str(kwargs.get("dtype", kwargs.get("torch_dtype", ""))).removeprefix("torch.")
    sections["model"] |= {
        "trust_remote_code": bool(kwargs.get("trust_remote_code", False)),
        "lora": None if data.lora is None else dict(data.lora),
    }
    if dtype not in ("", "float32", "bfloat16"):
        raise BadInputError(f"GRPOConfig.model_init_kwargs: dtype={dtype!r}: must be float32 or bfloat16.")
    if dtype == "bfloat16":
        sections["model"]["dtype"] = dtype
    sections["learner"] = {"num_ranks": generation.ranks}
    sections["log"] |= _tables(config, counts)
    sections["eval"] |= {
        "num_prompts": max(1, data.num_eval),
        "temperature": config.temperature,
        "samples_per_prompt": config.num_generations_eval or config.num_generations,
    }
    sections["data"] = {
        "train": {"source": "jsonl", "path": "start/prompts.jsonl"},
        "held_out": 0,
        "max_prompt_tokens": data.max_prompt_tokens,
        "shuffle": config.shuffle_dataset,
    }
    longest = data.max_prompt_tokens + config.max_completion_length
    sections["batch"] = {
        "prompts_per_step": generation.size // config.num_generations,
        "samples_per_prompt": config.num_generations,
        "tokens_per_micro_batch": config.per_device_train_batch_size * longest,
    }
    sections["rollout"] = {
        "temperature": config.temperature,
        "max_new_tokens": config.max_completion_length,
        "stop": [stops["stop"]] if isinstance(stops.get("stop"), str) else list(stops.get("stop", ())),
        "stop_token_ids": list(stops.get("stop_token_ids", ())),
        "gpu_memory_fraction": config.vllm_gpu_memory_utilization,
        "tensor_parallel_size": config.vllm_tensor_parallel_size,
    }
    sections["rewards"] = {"scorers": list(data.scorers), "on_failure": "drop", "max_failure_fraction": 0.0}
    sections["algorithm"] = grpo_algorithm(config, generation.mini_batches)
    return build_config(sections, config.settings)


def grpo_algorithm(config: GRPOConfig, mini_batches: int) -> dict[str, Any]:
    """The section `algorithm`, as plain data."""
    kind, aggregation = LOSS_TYPES[config.loss_type]
    low, high = _clip(config)
    return {
        "name": "grpo",
        "num_epochs": config.num_iterations,
        "num_mini_batches": mini_batches,
        "scale": SCALES[str(config.scale_rewards).lower()],
        "kl": {"coef": config.beta, "place": "loss", "estimator": "k3"},
        "loss": {
            "kind": kind,
            "aggregation": aggregation,
            "ratio": RATIOS[config.importance_sampling_level],
            "clip_low": low,
            "clip_high": high,
            "temperature_positive": config.sapo_temperature_pos,
            "temperature_negative": config.sapo_temperature_neg,
            "mask_truncated": config.mask_truncated_completions,
        },
    }


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


def _tables(config: GRPOConfig, counts: Counts) -> dict[str, Any]:
    every = config.logging_steps if config.logging_steps >= 1 else 1
    return {
        "progress": "none" if config.disable_tqdm else config.progress,
        "samples_every": max(1, int(every // counts.updates_per_step)) if config.log_completions else 0,
        "num_samples": config.num_completions_to_print or 5,
    }


def _mapping(name: str, value: Any, known: set[str]) -> dict[str, Any]:
    """A dict, or one as JSON text, with known keys only."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise BadInputError(f"GRPOConfig.{name}={value!r:.60}: not JSON ({error}).") from error
    if not isinstance(given, Mapping | None) or set(given or {}) - known:
        raise BadInputError(f"GRPOConfig.{name}={value!r:.60}: may hold {', '.join(sorted(known))}.")
    return dict(given or {})
