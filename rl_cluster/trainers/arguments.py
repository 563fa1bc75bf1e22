"""transformers TrainingArguments in, sections of a RunConfig out; what means nothing here is refused by name.

Every field of TrainingArguments is in exactly one of three tables: it acts, it is refused unless it has a
neutral value, or it is without effect (without_effect.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers.training_args import TrainingArguments

from rl_cluster.config.reading.load import apply_override, parse_config
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.callbacks import EVALUATION_METRICS, is_evaluation_metric

ACTS = frozenset(
    (
        "output_dir",
        "per_device_train_batch_size",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "optim",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "bf16",
        "gradient_checkpointing",
        "disable_tqdm",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "report_to",
        "run_name",
        "project",
        "eval_strategy",
        "eval_steps",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "seed",
        "use_cpu",
    )
)

_DEEPSPEED = (
    'the learner brings its own DeepSpeed: settings={"learner.zero_stage": 3, "learner.num_ranks": 2}'
)
_HUB = "push the exported folder yourself: AutoModelForCausalLM.from_pretrained(folder).push_to_hub(name)"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "use bf16, or float32"),
    "tf32": ((None, False), "set torch.backends.cuda.matmul.allow_tf32 in your own script"),
    "lr_scheduler_kwargs": ((None, {}), "the schedules here have no further settings"),
    "optim_args": ((None,), "use weight_decay, adam_beta1, adam_beta2 and adam_epsilon"),
    "optim_target_modules": ((None,), "all weights train, or the adapters of a peft_config"),
    "label_smoothing_factor": ((0.0,), "there are no labels in reinforcement learning"),
    "torch_compile": ((False,), "the learner does not compile"),
    "use_liger_kernel": ((False,), "the learner has kernels of its own"),
    "neftune_noise_alpha": ((None,), "noise in the embeddings would falsify the importance ratios"),
    "auto_find_batch_size": ((False,), "give per_device_train_batch_size"),
    "eval_delay": ((0, None), "evaluate with eval_steps, or from a callback"),
    "save_only_model": (
        (False,),
        "checkpoints hold all that a resumed run needs; the model is exported at the end",
    ),
    "enable_jit_checkpoint": ((False,), "use save_steps"),
    "push_to_hub": ((False,), _HUB),
    "full_determinism": ((False,), "set it in your own script: transformers.enable_full_determinism(seed)"),
    "data_seed": ((None,), "seed orders the data too"),
    "parallelism_config": ((None,), _DEEPSPEED),
    "train_sampling_strategy": (("random",), "prompts are shuffled in every epoch"),
    "ddp_backend": ((None,), 'settings={"sync.backend": "nccl"} chooses how weights travel'),
    "fsdp": ((None, "", [], False), _DEEPSPEED),
    "deepspeed": ((None,), _DEEPSPEED),
    "debug": (("", []), "there is no such mode"),
    "fp16_full_eval": ((False,), "use bf16, which evaluations then have, too"),
    "torch_compile_backend": ((None,), "the learner does not compile"),
    "torch_compile_mode": ((None,), "the learner does not compile"),
    "ignore_data_skip": ((False,), "a resumed run goes on at the next prompt"),
    "include_num_input_tokens_seen": (("no", False), "metrics.jsonl has lengths and tokens per second"),
    "resume_from_checkpoint": ((None,), "give it to train(): trainer.train(resume_from_checkpoint=RUN)"),
}

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}

NO_CLIPPING = 1e30
"""max_grad_norm 0 means none in transformers."""
KEEP_ALL = 1_000_000


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


STARTS_SOMETHING = ("deepspeed", "fsdp", "parallelism_config", "ddp_backend")
"""Refused before TrainingArguments' own __post_init__ starts what they ask for, or fails at it."""


def before_transformers(args: TrainingArguments) -> None:
    """Before TrainingArguments' own checks: they refuse bf16 where no GPU is, unless use_cpu says so.

    Raises BadInputError for arguments that would start something of theirs.
    """
    import torch

    for name in STARTS_SOMETHING:
        neutral, remedy = REFUSED[name]
        if getattr(args, name) not in neutral:
            raise BadInputError(f"{name}={getattr(args, name)!r:.60}: has no meaning here; {remedy}.")
    if args.bf16 and not torch.cuda.is_available():
        args.use_cpu = True


def check_arguments(args: TrainingArguments) -> None:
    """BadInputError that lists every argument with a value that has no meaning here."""
    problems = [
        f"{name}={getattr(args, name)!r}: has no meaning here; {remedy}."
        for name, (neutral, remedy) in REFUSED.items()
        if getattr(args, name) not in neutral
    ]
    schedule = args.lr_scheduler_type.value
    if schedule not in SCHEDULES:
        problems.append(f"lr_scheduler_type={schedule!r}: choose one of {', '.join(SCHEDULES)}.")
    if not args.optim.value.startswith("adamw_torch"):
        problems.append(f"optim={args.optim.value!r}: the optimizer is AdamW; leave it at adamw_torch.")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if not _is_whole(getattr(args, name)) or getattr(args, name) < 1:
            problems.append(f"{name}={getattr(args, name)!r}: must be a whole number above 0.")
    if not args.learning_rate > 0:
        problems.append(f"learning_rate={args.learning_rate!r}: must be above 0.")
    unknown = sorted(set(args.report_to) - {"tensorboard", "wandb"})
    if unknown:
        problems.append(f"report_to={unknown[0]!r}: choose among tensorboard, wandb and none.")
    problems += _evaluation_problems(args)
    if problems:
        raise BadInputError("\n".join(problems))


def _evaluation_problems(args: TrainingArguments) -> list[str]:
    problems = []
    evaluates = args.eval_strategy.value != "no"
    if args.load_best_model_at_end and not evaluates:
        problems.append("load_best_model_at_end=True: needs an eval_strategy, or nothing says which is best.")
    if args.eval_on_start and not evaluates:
        problems.append(
            "eval_on_start=True: needs an eval_strategy; with one, the start is evaluated always."
        )
    if args.bf16_full_eval and not args.bf16:
        problems.append("bf16_full_eval=True: evaluations have the dtype of training; set bf16=True.")
    metric = args.metric_for_best_model
    if metric is not None and not is_evaluation_metric(metric):
        known = ", ".join(EVALUATION_METRICS)
        problems.append(f"metric_for_best_model={metric!r}: evaluations have {known} and pass@k.")
    return problems


def argument_sections(args: TrainingArguments, counts: Counts) -> dict[str, Any]:
    """The sections run, optimizer, checkpoint, log, cluster, and parts of model and eval, as plain data."""
    return {
        "run": {
            "dir": args.output_dir,
            "seed": args.seed,
            "steps": counts.steps,
            "max_updates": counts.max_updates,
        },
        "model": {
            "dtype": "bfloat16" if args.bf16 else "float32",
            "gradient_checkpointing": args.gradient_checkpointing,
        },
        "optimizer": {
            "learning_rate": args.learning_rate,
            "betas": [args.adam_beta1, args.adam_beta2],
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
            "max_grad_norm": args.max_grad_norm or NO_CLIPPING,
            "schedule": SCHEDULES[args.lr_scheduler_type.value],
            "warmup_steps": _warmup(args, counts.updates),
        },
        "checkpoint": {
            "every": _loop_steps(args.save_strategy.value, args.save_steps, counts),
            "minutes": 10.0 if args.save_strategy.value in ("steps", "epoch") else 0.0,
            "keep_last": args.save_total_limit or KEEP_ALL,
            "keep_best": True,
        },
        "eval": {"every": _loop_steps(args.eval_strategy.value, args.eval_steps or 0, counts)},
        "log": {
            "trajectories": False,
            "tensorboard": "tensorboard" in args.report_to,
            "wandb_project": args.project if "wandb" in args.report_to else None,
        },
        "cluster": {"device": "cpu" if args.use_cpu else "auto"},
    }


def build_config(sections: Mapping[str, Any], settings: Mapping[str, Any] | str | None) -> RunConfig:
    """settings: dotted name -> value (or that as JSON text), the last word on everything."""
    data = dict(sections)
    for name, value in read_settings(settings).items():
        data = apply_override(data, f"{name}={json.dumps(value)}")
    return parse_config(data, "")


def read_settings(settings: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """{} for None; BadInputError for what is no mapping."""
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except ValueError as error:
            raise BadInputError(f"settings={settings!r:.60}: not JSON ({error}).") from error
    if not isinstance(settings, Mapping | None):
        raise BadInputError(f'settings={settings!r:.60}: give a dict such as {{"learner.num_ranks": 2}}.')
    return dict(settings or {})


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


def check_backend(owner: str, backend: object) -> None:
    """BadInputError for a backend that does not exist. owner: the configuration's class, for the message."""
    if backend not in ("auto", "local", "ray"):
        raise BadInputError(f"{owner}.backend={backend!r}: must be auto, local or ray.")


def check_cluster(owner: str, cluster: str | None, backend: object, settings: Any) -> None:
    """BadInputError for the address of a cluster beside the backend that uses none."""
    chosen = settings.get("cluster.backend", backend) if isinstance(settings, Mapping) else backend
    if cluster is not None and chosen == "local":
        raise BadInputError(
            f'{owner}.cluster={cluster!r}: backend="local" uses none, it is this process. Set one of the two.'
        )


def _warmup(args: TrainingArguments, updates: int) -> int:
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


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
