"""The settings that all fronts of training on fixed data share, and their way into a FitConfig."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_cluster.config.fit import (
    FitBatchConfig,
    FitConfig,
    FitDataConfig,
    FitEvalConfig,
    FitLogConfig,
    FitSection,
    Objective,
)
from rl_cluster.config.planning.backend import BackendChoice, choose_backend
from rl_cluster.config.run import (
    CheckpointConfig,
    ClusterConfig,
    LearnerConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
)
from rl_cluster.errors import BadInputError
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


def fit_config(
    settings: FitSettings,
    objective: Objective,
    model_path: str | Path,
    num_parameters: int | None,
    **data: Any,
) -> FitConfig:
    """The same as a FitConfig. data: further fields of its data section."""
    check_settings(settings)
    lora = settings.lora_rank
    return FitConfig(
        run=FitSection(
            dir=None if settings.output_dir is None else str(settings.output_dir),
            name=objective.name,
            seed=settings.seed,
            epochs=settings.num_epochs,
        ),
        model=ModelConfig(
            path=str(model_path),
            dtype="bfloat16" if settings.bf16 else "float32",
            gradient_checkpointing=settings.gradient_checkpointing,
            lora=None
            if lora is None
            else LoRAConfig(
                rank=lora, alpha=float(settings.lora_alpha), dropout=float(settings.lora_dropout)
            ),
        ),
        data=FitDataConfig(
            source="given",
            max_length=settings.max_length,
            max_prompt_length=settings.max_prompt_length,
            **data,
        ),
        objective=objective,
        batch=FitBatchConfig(
            rows_per_step=settings.batch_size * settings.gradient_accumulation_steps,
            tokens_per_micro_batch=settings.tokens_per_micro_batch,
        ),
        optimizer=OptimizerConfig(
            learning_rate=float(settings.learning_rate),
            weight_decay=float(settings.weight_decay),
            max_grad_norm=float(settings.max_grad_norm),
            schedule=settings.lr_scheduler_type,
        ),
        warmup_ratio=float(settings.warmup_ratio),
        learner=LearnerConfig(num_ranks=settings.num_ranks),
        cluster=ClusterConfig(
            backend="ray"
            if settings.num_ranks > 1 and settings.backend == "auto"
            else choose_backend(settings.backend, num_parameters),
            device=_device(settings),
            cpus_per_worker=settings.cpus_per_worker,
        ),
        eval=FitEvalConfig(every=settings.eval_every),
        checkpoint=CheckpointConfig(every=settings.save_every, minutes=10.0 if settings.save_every else 0.0),
        log=FitLogConfig(
            tensorboard=settings.report_to == "tensorboard",
            wandb_project="rl_cluster" if settings.report_to == "wandb" else None,
            progress=settings.progress,
        ),
    )


def _device(settings: FitSettings) -> Literal["auto", "cpu", "cuda"]:
    if settings.device is None:
        return "auto"
    kind = str(settings.device).split(":")[0]
    if kind not in ("cpu", "cuda", "auto"):
        raise BadInputError(
            f"{type(settings).__name__}.device={settings.device!r}: must be None, 'cpu' or 'cuda'."
        )
    return kind  # type: ignore[return-value]
