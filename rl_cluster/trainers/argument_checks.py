"""transformers TrainingArguments in; what means nothing here is refused by name.

Every field of TrainingArguments is in exactly one of three tables: it acts (arguments.py), it is refused
unless it has a neutral value, or it is without effect (without_effect.py).
"""

from __future__ import annotations

from typing import Any

from transformers.training_args import TrainingArguments

from rl_cluster.errors import BadInputError
from rl_cluster.trainers.callbacks import EVALUATION_METRICS, is_evaluation_metric
from rl_cluster.trainers.fields import check_backend, check_cluster, read_settings

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


def check_online(args: Any) -> None:
    """What check_arguments does, and for the settings that RLOOConfig and GRPOConfig both add."""
    check_arguments(args)
    owner = type(args).__name__
    check_backend(owner, args.backend)
    check_cluster(owner, args.cluster, args.backend, read_settings(args.settings))
    if args.warmup_ratio and args.warmup_steps:
        raise BadInputError(f"{owner}.warmup_ratio and warmup_steps are both given: give one.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
