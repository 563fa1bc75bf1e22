"""transformers TrainingArguments, and what RLOOConfig and GRPOConfig add to them, in; a RunConfig out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.training_args import TrainingArguments

from rl_cluster.config.reading.load import parse_config, with_settings
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.argument_checks import SCHEDULES, before_transformers
from rl_cluster.trainers.fields import Elsewhere, Table, read_settings, settings_by

NO_CLIPPING = 1e30
"""max_grad_norm 0 means none in transformers."""
KEEP_ALL = 1_000_000
SAVING = ("steps", "epoch")


@dataclass
class OnlineArguments(TrainingArguments):
    """TrainingArguments, and what RLOOConfig and GRPOConfig both add to them."""

    ds3_gather_for_generation: bool = field(
        default=True, metadata={"help": "Without effect: engines keep weights of their own."}
    )
    warmup_ratio: float = field(default=0.0, metadata={"help": "Warm-up as a share of all updates."})
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Delete an earlier run in output_dir; else it is refused."}
    )
    backend: str = field(
        default="auto",
        metadata={"help": "local: in this process; ray: on workers; auto: local for small models."},
    )
    cluster: str | None = field(default=None, metadata={"help": "Address of a Ray cluster, as RAY_ADDRESS."})
    progress: str = field(default="auto", metadata={"help": "auto, rich, plain or none."})
    settings: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Further settings of a run by dotted name, as JSON: {"learner.num_ranks": 2}.'},
    )

    def __post_init__(self) -> None:
        before_transformers(self)
        super().__post_init__()


ONLINE: Table = {
    "overwrite_output_dir": Elsewhere("an earlier run in output_dir is deleted"),
    "backend": Elsewhere("cluster.backend"),
    "cluster": Elsewhere("the Ray cluster to connect to"),
    "progress": ("log.progress", lambda args, _: "none" if args.disable_tqdm else args.progress),
    "settings": Elsewhere("anything by its dotted name"),
}
"""Fields that both add, and that mean the same."""


@dataclass(frozen=True)
class Counts:
    """steps: of the loop, one batch each. steps_per_epoch: batches in a pass over the prompts.

    max_updates: where the last step makes fewer than updates_per_step; else None.
    """

    steps: int
    updates_per_step: int
    steps_per_epoch: float
    max_updates: int | None = None

    @property
    def updates(self) -> int:
        """Of the whole run."""
        return self.max_updates or self.steps * self.updates_per_step


def _evaluations(args: TrainingArguments, counts: Counts) -> int:
    return _loop_steps(args.eval_strategy.value, args.eval_steps or 0, counts)


def _betas(args: TrainingArguments, counts: Counts) -> list[float]:
    return [args.adam_beta1, args.adam_beta2]


_LOGS, _BEST = (
    Elsewhere("when callbacks are told of a log"),
    Elsewhere("which checkpoint is the best, or kept"),
)

ARGUMENTS: Table = {
    "output_dir": "run.dir",
    "per_device_train_batch_size": Elsewhere("the sizes of batches, by each front's arithmetic"),
    "num_train_epochs": ("run.steps", lambda _, counts: counts.steps),
    "max_steps": {
        "run.steps": lambda _, counts: counts.steps,
        "run.max_updates": lambda _, counts: counts.max_updates,
    },
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": ("optimizer.schedule", lambda args, _: SCHEDULES[args.lr_scheduler_type.value]),
    "warmup_steps": ("optimizer.warmup_steps", lambda args, counts: warmup(args, counts.updates)),
    "optim": Elsewhere("AdamW; any other is refused"),
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": ("optimizer.betas", _betas),
    "adam_beta2": ("optimizer.betas", _betas),
    "adam_epsilon": "optimizer.eps",
    "gradient_accumulation_steps": Elsewhere("the sizes of batches, by each front's arithmetic"),
    "max_grad_norm": ("optimizer.max_grad_norm", lambda args, _: args.max_grad_norm or NO_CLIPPING),
    "bf16": ("model.dtype", lambda args, _: "bfloat16" if args.bf16 else "float32"),
    "gradient_checkpointing": "model.gradient_checkpointing",
    "disable_tqdm": ("log.progress", lambda args, _: "none" if args.disable_tqdm else args.progress),
    "logging_strategy": _LOGS,
    "logging_steps": _LOGS,
    "logging_first_step": _LOGS,
    "report_to": ("log.tensorboard", lambda args, _: "tensorboard" in args.report_to),
    "run_name": ("run.name", lambda args, _: args.run_name),
    "project": ("log.wandb_project", lambda args, _: args.project if "wandb" in args.report_to else None),
    "eval_strategy": ("eval.every", _evaluations),
    "eval_steps": ("eval.every", _evaluations),
    "save_strategy": ("checkpoint.minutes", lambda args, _: 10.0 * (args.save_strategy.value in SAVING)),
    "save_steps": (
        "checkpoint.every",
        lambda args, counts: _loop_steps(args.save_strategy.value, args.save_steps, counts),
    ),
    "save_total_limit": ("checkpoint.keep_last", lambda args, _: args.save_total_limit or KEEP_ALL),
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": _BEST,
    "greater_is_better": _BEST,
    "seed": "run.seed",
    "use_cpu": ("cluster.device", lambda args, _: "cpu" if args.use_cpu else "auto"),
}
"""Arguments that act -> what they set, in the configuration of a run."""
ACTS = frozenset(ARGUMENTS)


def online_config(
    table: Table, args: OnlineArguments, facts: Any, counts: Counts, fixed: Mapping[str, Any]
) -> RunConfig:
    """What the arguments, a front's own fields by its table, and `fixed` settings make; args.settings have
    the last word. counts: for the arguments. facts: for the table."""
    settings = {
        "checkpoint.keep_best": True,
        "log.trajectories": False,
        "data.train.source": "jsonl",
        "data.train.path": "start/prompts.jsonl",
        "data.held_out": 0,
        "rewards.on_failure": "drop",
        "rewards.max_failure_fraction": 0.0,
        **settings_by(ARGUMENTS, args, counts),
        **settings_by(table, args, facts),
        **fixed,
    }
    return parse_config(with_settings(with_settings({}, settings), read_settings(args.settings)))


def num_steps(
    args: TrainingArguments, num_prompts: int, prompts_per_step: int, updates_per_step: int
) -> Counts:
    """max_steps counts optimizer updates where it is above 0; else num_train_epochs passes are made."""
    per_epoch = num_prompts / prompts_per_step
    cut = None
    if args.max_steps > 0:
        steps = math.ceil(args.max_steps / updates_per_step)
        # As in TRL, the last batch is left in the midst of its updates.
        cut = args.max_steps if args.max_steps % updates_per_step else None
    else:
        if not args.num_train_epochs > 0:
            raise BadInputError(f"num_train_epochs={args.num_train_epochs!r}: must be above 0.")
        # Rounding guards against 0.1 + 0.2: an epoch that is a whole number of steps stays one.
        steps = math.ceil(round(args.num_train_epochs * per_epoch, 9))
    return Counts(steps, updates_per_step, per_epoch, cut)


def warmup(args: TrainingArguments, updates: int) -> int:
    """Below 1, transformers takes warmup_steps for a share of all updates."""
    asked = args.warmup_steps
    return math.ceil(asked * updates) if 0 < asked < 1 else int(asked)


def _loop_steps(strategy: str, every: float, counts: Counts) -> int:
    """Optimizer updates (below 1: a share of all) as steps of the loop; 0: never."""
    if strategy == "epoch":
        return math.ceil(counts.steps_per_epoch)
    if strategy != "steps" or not every > 0:
        return 0
    updates = every * counts.updates if every < 1 else every
    return max(1, math.ceil(updates / counts.updates_per_step))
