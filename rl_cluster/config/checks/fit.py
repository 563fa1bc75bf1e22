"""A FitConfig and a Machine in; BadInputError with every combination that cannot work out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rl_cluster.config.checks.model import (
    exactly_one_model,
    folder_problems,
    model_folder_exists,
    scratch_model_is_sound,
)
from rl_cluster.config.fit import DPO, KTO, FitConfig, RewardObjective
from rl_cluster.config.planning.machine import Machine
from rl_cluster.config.reading.problems import Problem, refuse


def on_cpu(config: FitConfig, machine: Machine) -> bool:
    device = config.cluster.device
    return device == "cpu" or (device == "auto" and machine.gpus == 0)


def data_is_named(config: FitConfig, machine: Machine) -> Iterator[Problem]:
    data = config.data
    if data.source != "given" and data.path is None:
        yield Problem("data.path", None, f"is required where data.source is {data.source}", "Name the file.")
    if data.source == "given" and (data.path or data.eval_path):
        remedy = "Leave the path out, or set data.source to jsonl, parquet or dataset."
        yield Problem(
            "data.path", data.path or data.eval_path, "is not read where data.source is given", remedy
        )
    if data.eval_path is not None and data.held_out:
        reason = "is given together with data.eval_path"
        yield Problem("data.held_out", data.held_out, reason, "Remove one of the two.")
    if data.margin_column is not None and not isinstance(config.objective, RewardObjective):
        reason = f"has no meaning for {config.objective.name}"
        yield Problem("data.margin_column", data.margin_column, reason, "Only reward models have margins.")


def lengths_leave_room(config: FitConfig, machine: Machine) -> Iterator[Problem]:
    if config.data.max_length < 2:
        reason = "leaves no room for a prompt and a response"
        yield Problem("data.max_length", config.data.max_length, reason, "Give at least 2.")


def objective_is_sound(config: FitConfig, machine: Machine) -> Iterator[Problem]:
    objective = config.objective
    if isinstance(objective, DPO | KTO) and objective.reference_model is not None:
        yield from folder_problems("objective.reference_model", objective.reference_model)
    if isinstance(objective, DPO):
        if objective.label_smoothing and objective.loss != "sigmoid":
            reason = f"has no meaning for the {objective.loss} loss"
            remedy = "Set it to 0, or objective.loss to sigmoid."
            yield Problem("objective.label_smoothing", objective.label_smoothing, reason, remedy)
        if objective.reference_free and objective.reference_model is not None:
            reason = "is given together with objective.reference_free"
            yield Problem(
                "objective.reference_model", objective.reference_model, reason, "Remove one of the two."
            )
    if isinstance(objective, KTO) and objective.desirable_weight == objective.undesirable_weight == 0:
        reason = "is 0, as objective.undesirable_weight is: nothing would train"
        yield Problem("objective.desirable_weight", 0, reason, "Give one of them a weight.")


def schedule_is_sound(config: FitConfig, machine: Machine) -> Iterator[Problem]:
    if config.warmup_ratio and config.optimizer.warmup_steps:
        reason = "is given together with optimizer.warmup_steps"
        yield Problem("warmup_ratio", config.warmup_ratio, reason, "Remove one of the two.")
    if config.warmup_ratio >= 1:
        yield Problem("warmup_ratio", config.warmup_ratio, "is the whole run", "Give less than 1.")


def model_is_plain(config: FitConfig, machine: Machine) -> Iterator[Problem]:
    model = config.model
    if model.supervised is not None:
        reason = "belongs to train; a fit with the objective sft is supervised training itself"
        yield Problem("model.supervised", "…", reason, "Leave it out.")
    if model.lora is not None and model.lora.targets == ():
        remedy = 'List layer names, or write "all-linear".'
        yield Problem("model.lora.targets", [], "names no layer", remedy)


def workers_fit(config: FitConfig, machine: Machine) -> Iterator[Problem]:
    ranks, device = config.learner.num_ranks, config.cluster.device
    if device == "cuda" and machine.gpus == 0:
        yield Problem("cluster.device", "cuda", "no NVIDIA GPU answers on this machine", "Use auto or cpu.")
        return
    if config.cluster.backend == "local" and ranks > 1:
        reason = "the local backend is one process"
        yield Problem("learner.num_ranks", ranks, reason, "Set it to 1, or cluster.backend to ray.")
    if on_cpu(config, machine):
        each = config.cluster.cpus_per_worker or 1
        if ranks * each > machine.total_cores:
            reason = f"ranks of {each} cores need more than the {machine.total_cores} there are"
            yield Problem("learner.num_ranks", ranks, reason, f"Give at most {machine.total_cores // each}.")
        if config.learner.offload_optimizer:
            reason = "moves optimizer states from a GPU to the CPU, and there is no GPU"
            yield Problem("learner.offload_optimizer", True, reason, "Set it to false.")
    elif ranks > machine.total_gpus:
        reason = f"each rank takes a GPU, and there are {machine.total_gpus}"
        yield Problem("learner.num_ranks", ranks, reason, f"Give at most {machine.total_gpus}.")


Check = Callable[[FitConfig, Machine], Iterable[Problem]]

CHECKS: tuple[Check, ...] = (
    exactly_one_model,
    model_folder_exists,
    scratch_model_is_sound,
    model_is_plain,
    data_is_named,
    lengths_leave_room,
    objective_is_sound,
    schedule_is_sound,
    workers_fit,
)


def check_fit_config(config: FitConfig, machine: Machine, source: str = "") -> None:
    """Raise BadInputError that lists all problems, each with field, value and remedy."""
    refuse((problem for check in CHECKS for problem in check(config, machine)), source)
