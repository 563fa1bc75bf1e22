"""The settings that all fronts on fixed data share in; BadInputError that names the first wrong one out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl_cluster.checks import check_number, check_whole_number
from rl_cluster.errors import BadInputError

if TYPE_CHECKING:
    from rl_cluster.trainers.fixed_data.settings import FitSettings

WHOLE = {
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "max_length": 2,
    "max_prompt_length": 1,
    "eval_every": 0,
    "save_every": 0,
    "seed": 0,
    "num_ranks": 1,
    "tokens_per_micro_batch": 1,
}
WHOLE_OR_NONE = ("lora_rank", "cpus_per_worker")
POSITIVE = ("learning_rate", "max_grad_norm", "lora_alpha")
AT_LEAST_0 = ("weight_decay", "warmup_ratio", "lora_dropout")
BELOW_1 = ("warmup_ratio", "lora_dropout")
SWITCHES = ("bf16", "gradient_checkpointing")
CHOICES: dict[str, tuple[object, ...]] = {
    "lr_scheduler_type": ("constant", "linear", "cosine"),
    "backend": ("auto", "local", "ray"),
    "progress": ("auto", "rich", "plain", "none"),
    "report_to": ("tensorboard", "wandb", "none"),
}


def check_settings(settings: FitSettings) -> None:
    """BadInputError that names the first field of the wrong type or out of range."""
    name = type(settings).__name__
    for field, least in WHOLE.items():
        check_whole_number(f"{name}.{field}", getattr(settings, field), at_least=least)
    for field in WHOLE_OR_NONE:
        if getattr(settings, field) is not None:
            check_whole_number(f"{name}.{field}", getattr(settings, field))
    for field in POSITIVE:
        check_number(f"{name}.{field}", getattr(settings, field), above=0.0)
    for field in AT_LEAST_0:
        check_number(f"{name}.{field}", getattr(settings, field), at_least=0.0)
    for field in BELOW_1:
        if getattr(settings, field) >= 1:
            raise BadInputError(f"{name}.{field}={getattr(settings, field)}: must be below 1.")
    for field in SWITCHES:
        check_switch(f"{name}.{field}", getattr(settings, field))
    for field, options in CHOICES.items():
        if getattr(settings, field) not in options:
            listed = ", ".join(map(str, options))
            raise BadInputError(f"{name}.{field}={getattr(settings, field)!r}: must be one of {listed}.")
    if settings.output_dir is not None and not isinstance(settings.output_dir, str | Path):
        raise BadInputError(f"{name}.output_dir={settings.output_dir!r:.60}: give the path of a folder.")
    _check_together(settings)


def _check_together(settings: FitSettings) -> None:
    name = type(settings).__name__
    if settings.max_prompt_length >= settings.max_length:
        raise BadInputError(
            f"{name}.max_prompt_length={settings.max_prompt_length}: must be below max_length "
            f"({settings.max_length}), or the longest prompts leave no room for a response."
        )
    if settings.lora_rank is None:
        for field in ("lora_alpha", "lora_dropout"):
            if getattr(settings, field) != type(settings).__dataclass_fields__[field].default:
                raise BadInputError(
                    f"{name}.{field}={getattr(settings, field)!r}: is for adapters. Set lora_rank, too."
                )
    if settings.num_ranks > 1 and settings.backend == "local":
        raise BadInputError(
            f'{name}.num_ranks={settings.num_ranks}: backend="local" is one process. Set it to 1, or backend '
            'to "ray".'
        )


def check_switch(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise BadInputError(f"{field}={value!r}: must be True or False.")
