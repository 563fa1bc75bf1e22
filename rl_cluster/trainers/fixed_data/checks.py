"""The settings that all fronts on fixed data share in; BadInputError that names the first wrong one out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fields import (
    COUNT,
    COUNT_OR_0,
    COUNT_OR_NONE,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    check_fields,
)

if TYPE_CHECKING:
    from rl_cluster.trainers.fixed_data.settings import FitSettings

RANGES = {
    COUNT: "batch_size gradient_accumulation_steps num_epochs max_prompt_length num_ranks "
    "tokens_per_micro_batch",
    COUNT_OR_0: "eval_every save_every seed",
    COUNT_OR_NONE: "lora_rank cpus_per_worker",
    Range(at_least=2, whole=True): "max_length",
    POSITIVE: "learning_rate max_grad_norm lora_alpha",
    NOT_NEGATIVE: "weight_decay",
    Range(at_least=0.0, below=1.0): "warmup_ratio lora_dropout",
}
SWITCHES = "bf16 gradient_checkpointing"
CHOICES: dict[str, tuple[object, ...]] = {
    "lr_scheduler_type": ("constant", "linear", "cosine"),
    "backend": ("auto", "local", "ray"),
    "progress": ("auto", "rich", "plain", "none"),
    "report_to": ("tensorboard", "wandb", "none"),
}


def check_settings(settings: FitSettings) -> None:
    """BadInputError that names the first field of the wrong type or out of range."""
    name = type(settings).__name__
    check_fields(settings, RANGES, CHOICES, SWITCHES)
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
