"""The settings that all fronts of training on fixed data share, and their way into a FitConfig."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_cluster.config.fit import FitConfig, Objective
from rl_cluster.config.planning.backend import BackendChoice, choose_backend
from rl_cluster.config.reading.load import parse_as, with_settings
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fields import Table, settings_by
from rl_cluster.trainers.fixed_data.checks import check_settings


@dataclass
class FitSettings:
    """Common to DPO, ORPO, KTO, SFT and reward training.

    model_name: a name or folder, unless the trainer is given a model. batch_size: examples (pairs count as
    one) at a time; an optimizer step takes batch_size × gradient_accumulation_steps of them, over all ranks.
    warmup_ratio: share of the steps in which the learning rate rises. max_length: tokens of prompt and
    response together; prompts keep their end, responses their start. eval_every, save_every: optimizer
    steps, 0: only at the end, and no checkpoint. device: None takes the GPU if there is one. lora_rank: train
    adapters only. num_ranks: of the learner; several run on Ray. cpus_per_worker: threads of each rank;
    default: the cores, shared out. backend: local (this process), ray, or auto by the model's size.
    output_dir: the run folder; default runs/NAME-DATE-TIME.
    """

    model_name: str | None = None
    learning_rate: float = 1e-6
    batch_size: int = 8
    gradient_accumulation_steps: int = 2
    num_epochs: int = 1
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    warmup_ratio: float = 0.1
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    max_length: int = 512
    max_prompt_length: int = 256
    eval_every: int = 100
    save_every: int = 500
    device: str | None = None
    seed: int = 0
    bf16: bool = False
    gradient_checkpointing: bool = False
    lora_rank: int | None = None
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    num_ranks: int = 1
    cpus_per_worker: int | None = None
    tokens_per_micro_batch: int = 8192
    backend: BackendChoice = "auto"
    output_dir: str | Path | None = None
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    report_to: Literal["tensorboard", "wandb", "none"] = "tensorboard"

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses names that are not settings: a typing error would otherwise have no effect."""
        if name not in self.__dataclass_fields__:
            raise BadInputError(f"{type(self).__name__}.{name}={value!r:.60}: there is no such setting.")
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class _Facts:
    model_path: str
    num_parameters: int | None


def _rows_per_step(settings: FitSettings, facts: _Facts) -> int:
    return settings.batch_size * settings.gradient_accumulation_steps


def _lora(settings: FitSettings, facts: _Facts) -> dict[str, Any] | None:
    if settings.lora_rank is None:
        return None
    return {"rank": settings.lora_rank, "alpha": settings.lora_alpha, "dropout": settings.lora_dropout}


def _backend(settings: FitSettings, facts: _Facts) -> str:
    if settings.num_ranks > 1 and settings.backend == "auto":
        return "ray"
    return choose_backend(settings.backend, facts.num_parameters)


FIT: Table = {
    "model_name": ("model.path", lambda _, facts: facts.model_path),
    "learning_rate": "optimizer.learning_rate",
    "batch_size": ("batch.rows_per_step", _rows_per_step),
    "gradient_accumulation_steps": ("batch.rows_per_step", _rows_per_step),
    "num_epochs": "run.epochs",
    "max_grad_norm": "optimizer.max_grad_norm",
    "weight_decay": "optimizer.weight_decay",
    "warmup_ratio": "warmup_ratio",
    "lr_scheduler_type": "optimizer.schedule",
    "max_length": "data.max_length",
    "max_prompt_length": "data.max_prompt_length",
    "eval_every": "eval.every",
    "save_every": "checkpoint.every",
    "device": ("cluster.device", lambda settings, _: _device(settings)),
    "seed": "run.seed",
    "bf16": ("model.dtype", lambda settings, _: "bfloat16" if settings.bf16 else "float32"),
    "gradient_checkpointing": "model.gradient_checkpointing",
    **dict.fromkeys(("lora_rank", "lora_alpha", "lora_dropout"), ("model.lora", _lora)),
    "num_ranks": "learner.num_ranks",
    "cpus_per_worker": "cluster.cpus_per_worker",
    "tokens_per_micro_batch": "batch.tokens_per_micro_batch",
    "backend": ("cluster.backend", _backend),
    "output_dir": (
        "run.dir",
        lambda settings, _: None if settings.output_dir is None else str(settings.output_dir),
    ),
    "progress": "log.progress",
    "report_to": ("log.tensorboard", lambda settings, _: settings.report_to == "tensorboard"),
}
"""Field of FitSettings -> what it sets in the FitConfig."""


def fit_config(
    settings: FitSettings,
    objective: Objective,
    model_path: str | Path,
    num_parameters: int | None,
    **data: Any,
) -> FitConfig:
    """The same as a FitConfig. data: further fields of its data section."""
    check_settings(settings)
    fixed = {
        "run.name": objective.name,
        "data.source": "given",
        **{f"data.{name}": value for name, value in data.items()},
        "objective": objective.model_dump(mode="json", by_alias=True),
        "checkpoint.minutes": 10.0 if settings.save_every else 0.0,
        "log.wandb_project": "rl_cluster" if settings.report_to == "wandb" else None,
    }
    made = settings_by(FIT, settings, _Facts(str(model_path), num_parameters)) | fixed
    return parse_as(FitConfig, with_settings({}, made), type(settings).__name__)


def _device(settings: FitSettings) -> Literal["auto", "cpu", "cuda"]:
    if settings.device is None:
        return "auto"
    kind = str(settings.device).split(":")[0]
    if kind not in ("cpu", "cuda", "auto"):
        raise BadInputError(
            f"{type(settings).__name__}.device={settings.device!r}: must be None, 'cpu' or 'cuda'."
        )
    return kind  # type: ignore[return-value]
