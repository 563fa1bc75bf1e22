"""Checks of the model section: does it exist, does it fit the data and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from rl_cluster.config.data import AdditionSource, FileSource
from rl_cluster.config.planning.derive import max_prompt_tokens
from rl_cluster.config.planning.machine import Machine
from rl_cluster.config.planning.model_shape import find_shape
from rl_cluster.config.reading.problems import Problem
from rl_cluster.config.run import ModelConfig, RunConfig


class HasModel(Protocol):
    """A RunConfig or a FitConfig."""

    @property
    def model(self) -> ModelConfig: ...


OUR_FOLDERS = ("models", "runs", "checkpoints")
"""A relative path that starts so is meant as a folder, even where it does not exist."""


def exactly_one_model(config: HasModel, machine: Machine) -> Iterator[Problem]:
    path, scratch = config.model.path, config.model.scratch
    if path is None and scratch is None:
        remedy = (
            "Give a Hugging Face folder or hub name, or model.scratch={} for a tiny model made on the spot."
        )
        yield Problem("model.path", None, "no model is given", remedy)
    if path is not None and scratch is not None:
        yield Problem("model.path", path, "is given together with model.scratch", "Remove one of the two.")


def model_folder_exists(config: HasModel, machine: Machine) -> Iterator[Problem]:
    if config.model.path is not None:
        yield from folder_problems("model.path", config.model.path)
    if config.model.reference_path is not None:
        yield from folder_problems("model.reference_path", config.model.reference_path)


def folder_problems(field: str, path: str) -> Iterator[Problem]:
    """Problems of a path that names a local model folder; a hub name (`owner/name`) has none here."""
    folder = Path(path or "/no/name").expanduser()
    if folder.is_file():
        yield Problem(field, path, "is a file", "Give the folder that holds config.json and the weights.")
    elif folder.is_dir():
        if not (folder / "config.json").is_file():
            reason = "has no config.json, so it is not a Hugging Face model folder"
            yield Problem(field, path, reason, "Give the folder that holds config.json and the weights.")
    elif _means_folder(path):
        remedy = "Give an existing folder, or a hub name of the form owner/name."
        yield Problem(field, path, "there is no such folder", remedy)


def _means_folder(path: str) -> bool:
    parts = Path(path).parts
    return (
        not parts
        or path.startswith(("/", ".", "~"))
        or path.endswith("/")
        or len(parts) > 2
        or parts[0] in OUR_FOLDERS
        or Path(parts[0]).is_dir()
    )


def scratch_model_is_sound(config: HasModel, machine: Machine) -> Iterator[Problem]:
    scratch = config.model.scratch
    if scratch is None:
        return
    if scratch.hidden_size % scratch.num_heads:
        yield Problem(
            "model.scratch.num_heads",
            scratch.num_heads,
            f"does not divide hidden_size = {scratch.hidden_size}",
            "Choose a divisor of it.",
        )
    elif (scratch.hidden_size // scratch.num_heads) % 2:
        reason = (
            f"gives heads of odd size {scratch.hidden_size // scratch.num_heads}; rotary positions need even"
        )
        yield Problem(
            "model.scratch.num_heads", scratch.num_heads, reason, "Change hidden_size or num_heads."
        )
    if not scratch.alphabet or len(set(scratch.alphabet)) < len(scratch.alphabet):
        remedy = "List each character once."
        yield Problem("model.scratch.alphabet", scratch.alphabet, "is empty or repeats a character", remedy)


def alphabet_covers_data(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    scratch, source = config.model.scratch, config.data.train
    if scratch is None or not isinstance(source, AdditionSource):
        return
    text = source.template.replace("{a}", "").replace("{b}", "") + "0123456789"
    missing = sorted(set(text) - set(scratch.alphabet))
    if missing:
        reason = f"lacks {''.join(missing)!r}, which data.train writes"
        yield Problem("model.scratch.alphabet", scratch.alphabet, reason, "Add these characters.")


def chat_needs_template(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    source = config.data.train
    if config.model.scratch is not None and not isinstance(source, FileSource) and source.chat:
        reason = "a scratch model's tokenizer has no chat template"
        yield Problem("data.train.chat", True, reason, "Set it to false, or give model.path.")


def positions_suffice(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if config.model.path is None and config.model.scratch is None:
        return
    shape = find_shape(config.model)
    if shape is None or shape.max_positions is None:
        return
    prompt = max_prompt_tokens(config)
    wanted = {"rollout.max_new_tokens": config.rollout.max_new_tokens}
    if config.eval.max_new_tokens is not None:
        wanted["eval.max_new_tokens"] = config.eval.max_new_tokens
    for field, new in wanted.items():
        if prompt + new > shape.max_positions:
            reason = f"with prompts of {prompt} tokens exceeds the model's {shape.named_positions}"
            yield Problem(field, new, reason, "Lower it or data.max_prompt_tokens.")


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention for CPUs is compiled for; with another size its engine dies at the first request."""


def engine_has_the_head_size(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    on_cpu = config.cluster.device == "cpu" or (config.cluster.device == "auto" and machine.gpus == 0)
    if config.cluster.backend == "local":
        return
    if not on_cpu or (config.model.path is None and config.model.scratch is None):
        return
    shape = find_shape(config.model)
    if shape is None or not shape.is_its_own or shape.head_dim in CPU_HEAD_SIZES:
        return
    sizes = ", ".join(map(str, CPU_HEAD_SIZES))
    reason = f"has attention heads of size {shape.head_dim}, which vLLM's CPU engine cannot do"
    if config.model.scratch is not None:
        remedy = f"Choose hidden_size / num_heads among {sizes}."
        yield Problem("model.scratch.num_heads", config.model.scratch.num_heads, reason, remedy)
    else:
        yield Problem("model.path", config.model.path, reason, f"On CPUs it can do {sizes}.")


def lora_is_sound(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    lora = config.model.lora
    if lora is None:
        return
    if lora.targets == ():
        yield Problem("model.lora.targets", [], "names no layer", 'List layer names, or write "all-linear".')
    if config.sync.backend == "ipc":
        reason = "hands over whole weights, and under LoRA only adapters travel"
        yield Problem("sync.backend", "ipc", reason, "Use auto, or remove model.lora.")


MODEL_CHECKS = (
    exactly_one_model,
    model_folder_exists,
    scratch_model_is_sound,
    alphabet_covers_data,
    chat_needs_template,
    positions_suffice,
    engine_has_the_head_size,
    lora_is_sound,
)
