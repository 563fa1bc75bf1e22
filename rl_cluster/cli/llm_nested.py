"""Flags in, dotted settings and nested data of a configuration out; and messages that name the flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_cluster.cli.llm_flags import ACTS_FOR, Flags, flag_name
from rl_cluster.config.planning.backend import choose_backend
from rl_cluster.config.planning.model_shape import find_shape
from rl_cluster.config.reading.load import with_settings
from rl_cluster.config.run import ModelConfig
from rl_cluster.trainers.fields import Table, paths_of, settings_by


@dataclass(frozen=True)
class Place:
    """What flags have become so far: the model's folder or name, and the run's folder."""

    model: str
    run_dir: Path


def nested(table: Table, flags: Flags, place: Place, *further: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a configuration: by the table, then by `further` settings; None is left out."""
    settings = settings_by(table, flags, place)
    for more in further:
        settings |= more
    return with_settings({}, {path: value for path, value in settings.items() if value is not None})


def with_flags(message: str, table: Table, trainer: str) -> str:
    """The message, and by which flag each setting that it speaks of is set."""
    found = [
        f"{path} is {flag_name(name)}"
        for name, rule in table.items()
        if trainer in ACTS_FOR[name]
        for path in paths_of(rule)
        if re.search(rf"(?<![\w.]){re.escape(path)}(?!\w|\.\w)", message)
    ]
    return message + (f"\n(On this command line {', '.join(dict.fromkeys(found))}.)" if found else "")


def model_folder(path: str) -> str:
    """Of a run folder: what it exported; any other path or name as it is."""
    run = Path(path).expanduser()
    exported = run / "model"
    is_run = (run / "config.yaml").is_file() and (exported / "config.json").is_file()
    return str(exported) if is_run else path


def backend_of(flags: Flags, model: str) -> Literal["local", "ray"]:
    """--backend; auto: by the model's size."""
    shape = find_shape(ModelConfig(path=model))
    return choose_backend(flags.backend, None if shape is None else shape.num_parameters)


def _targets(flags: Flags, place: Place) -> Any:
    targets = flags.target_modules
    if targets is None or targets == "all-linear":
        return targets
    return [name.strip() for name in targets.split(",")]


DTYPES = {None: None, "no": "float32", "bf16": "bfloat16"}

COMMON: Table = {
    "model": ("model.path", lambda _, place: place.model),
    "project_name": ("run.dir", lambda _, place: str(place.run_dir)),
    "trust_remote_code": "model.trust_remote_code",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "mixed_precision": ("model.dtype", lambda flags, _: DTYPES[flags.mixed_precision]),
    "peft": ("model.lora", lambda flags, _: {} if flags.peft else None),
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "target_modules": ("model.lora.targets", _targets),
    "on_bad_row": "data.on_bad_row",
    "held_out": ("data.held_out", lambda flags, _: flags.held_out or 0),
    "lr": "optimizer.learning_rate",
    "scheduler": "optimizer.schedule",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "seed": "run.seed",
    "trainer": ("run.name", lambda flags, _: flags.trainer),
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "backend": ("cluster.backend", lambda flags, place: backend_of(flags, place.model)),
    "device": "cluster.device",
    "num_ranks": "learner.num_ranks",
    "progress": "log.progress",
    "log": {
        "log.wandb_project": lambda flags, place: place.run_dir.name if flags.log == "wandb" else None,
        "log.tensorboard": lambda flags, _: None if flags.log is None else flags.log == "tensorboard",
    },
}
"""Flag -> the setting that it is, in runs and in fits alike."""
