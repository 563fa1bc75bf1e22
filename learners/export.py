"""A trained model becomes an ordinary Hugging Face folder (full training) or a peft adapter (LoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from learners.engine import Engine
from learners.state_files import write_safetensors
from rl_cluster.errors import CheckpointError
from rl_cluster.modeling.load import VALUE_HEAD_FILE
from rl_cluster.modeling.policy import CriticModel, PolicyModel, base_model, is_lora
from rl_cluster.modeling.score_model import ScoreModel


def export_model(
    module: PolicyModel | CriticModel | ScoreModel,
    groups: Iterator[list[tuple[str, torch.Tensor]]],
    engine: Engine,
    folder: Path,
    *,
    writes: bool,
) -> None:
    """Every rank runs through `groups` (a collective); the one that `writes` puts the files into `folder`.

    A value head goes beside the model, into value_head.safetensors. Raises CheckpointError on a full disk.
    """
    failure: Exception | None = None
    if writes:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_config(module, folder)
            write_safetensors(folder, _stem(module), groups)
        except (OSError, SafetensorError) as error:
            failure = error
    # The other ranks, and this one after a failure: every gather must happen on every rank.
    for _ in groups:
        pass
    failure = _export_value_head(module, engine, folder, writes and failure is None) or failure
    if failure is not None:
        raise CheckpointError(f"export: cannot write {folder}: {failure}") from failure


def _stem(module: PolicyModel | CriticModel | ScoreModel) -> str:
    return "adapter_model" if not isinstance(module, CriticModel) and is_lora(module.lm) else "model"


def _write_config(module: PolicyModel | CriticModel | ScoreModel, folder: Path) -> None:
    if isinstance(module, CriticModel):
        module.trunk.config.save_pretrained(folder)
        return
    if is_lora(module.lm):
        config = module.lm.peft_config[module.lm.active_adapter]
        config.inference_mode = True
        config.save_pretrained(folder)
        config.inference_mode = False
        return
    lm = base_model(module.lm)
    lm.config.architectures = [type(lm).__name__]
    lm.config.save_pretrained(folder)
    if isinstance(module, PolicyModel) and lm.generation_config is not None:
        lm.generation_config.save_pretrained(folder)


def _export_value_head(
    module: PolicyModel | CriticModel | ScoreModel, engine: Engine, folder: Path, writes: bool
) -> Exception | None:
    if module.value_head is None:
        return None
    named = list(module.value_head.named_parameters())
    with engine.gathered([parameter for _, parameter in named]):
        if writes:
            try:
                stem = VALUE_HEAD_FILE.removesuffix(".safetensors")
                write_safetensors(folder, stem, iter([[(name, p.data) for name, p in named]]))
            except (OSError, SafetensorError) as error:
                return error
    return None
