"""Flags in, dotted settings and nested data of a configuration out; and messages that name the flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rl_cluster.cli.llm_flags import Flags, flag_name
from rl_cluster.config.planning.backend import choose_backend
from rl_cluster.config.planning.model_shape import find_shape
from rl_cluster.config.run import ModelConfig


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """{"run.seed": 1} -> {"run": {"seed": 1}}; settings that are None are left out."""
    data: dict[str, Any] = {}
    for path, value in settings.items():
        if value is None:
            continue
        *sections, last = path.split(".")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return data


def from_table(flags: Flags, table: Mapping[str, str]) -> dict[str, Any]:
    """table: flag -> dotted setting that takes its value unchanged, if it was given."""
    given = {name: getattr(flags, name) for name in table}
    return {table[name]: value for name, value in given.items() if value is not None}


def with_flags(message: str, table: Mapping[str, str]) -> str:
    """The message, and by which flag each setting that it speaks of is set."""
    found = [
        f"{path} is {flag_name(name)}"
        for name, path in table.items()
        if re.search(rf"(?<![\w.]){re.escape(path)}(?![\w])", message)
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


def lora(flags: Flags) -> dict[str, Any] | None:
    """model.lora, with --peft."""
    if not flags.peft:
        return None
    targets = flags.target_modules
    if targets is not None and targets != "all-linear":
        targets = [name.strip() for name in targets.split(",")]  # type: ignore[assignment]
    given = {
        "rank": flags.lora_r,
        "alpha": flags.lora_alpha,
        "dropout": flags.lora_dropout,
        "targets": targets,
    }
    return {name: value for name, value in given.items() if value is not None}


COMMON = {
    "trust_remote_code": "model.trust_remote_code",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "on_bad_row": "data.on_bad_row",
    "lr": "optimizer.learning_rate",
    "scheduler": "optimizer.schedule",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "seed": "run.seed",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "device": "cluster.device",
    "num_ranks": "learner.num_ranks",
    "progress": "log.progress",
}
"""Flag -> the setting that it is, in runs and in fits alike."""

COMMON_NAMES = COMMON | {
    "model": "model.path",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "target_modules": "model.lora.targets",
    "backend": "cluster.backend",
    "project_name": "run.dir",
    "held_out": "data.held_out",
    "warmup_ratio": "optimizer.warmup_steps",
    "log": "log.wandb_project",
}
"""For messages: also those that need more than being copied."""

DTYPES = {None: None, "no": "float32", "bf16": "bfloat16"}


def common(flags: Flags, model: str, run_dir: Path) -> dict[str, Any]:
    """What runs and fits have alike, but for data and backend."""
    tensorboard = None if flags.log is None else flags.log == "tensorboard"
    return {
        **from_table(flags, COMMON),
        "run.dir": str(run_dir),
        "model.path": model,
        "model.lora": lora(flags),
        "model.dtype": DTYPES[flags.mixed_precision],
        "data.held_out": flags.held_out or 0,
        "log.tensorboard": tensorboard,
        "log.wandb_project": (run_dir.name if flags.log == "wandb" else None),
    }
