"""A peft LoraConfig in, the section model.lora out; what the learner's adapters cannot be is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

from rl_cluster.errors import BadInputError

ACTS = frozenset(("r", "lora_alpha", "lora_dropout", "target_modules"))
WITHOUT_EFFECT = frozenset(
    ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision")
)
"""They say what the adapters belong to, which is the trainer's model."""
OF_REFUSED = frozenset(("megatron_core", "qalora_group_size", "layers_pattern"))
"""Belong to a field that is refused."""


def lora_section(peft_config: Any) -> dict[str, Any]:
    """Raises BadInputError for another kind of adapters, and for every further field that is not at its
    default."""
    if type(peft_config).__name__ != "LoraConfig":
        raise BadInputError(f"peft_config is {type(peft_config).__name__}: give a peft.LoraConfig.")
    for field in dataclasses.fields(peft_config):
        if field.name in ACTS | WITHOUT_EFFECT | OF_REFUSED:
            continue
        plain = field.default
        if field.default_factory is not dataclasses.MISSING:
            plain = field.default_factory()
        if getattr(peft_config, field.name) != plain:
            raise BadInputError(
                f"peft_config.{field.name}={getattr(peft_config, field.name)!r:.60}: not here; leave it at "
                f"{plain!r}."
            )
    targets = peft_config.target_modules
    return {
        "rank": peft_config.r,
        "alpha": float(peft_config.lora_alpha),
        "dropout": float(peft_config.lora_dropout),
        "targets": "all-linear" if targets in (None, "all-linear") else sorted(_names(targets)),
    }


def _names(targets: Any) -> list[str]:
    if isinstance(targets, str):
        raise BadInputError(
            f"peft_config.target_modules={targets!r}: a pattern is not possible here. Give a list of names, "
            "or 'all-linear'."
        )
    return [str(target) for target in targets]
