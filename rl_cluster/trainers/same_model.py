"""A model object goes in; BadInputError where workers, which load it from a folder, would train another.

A folder holds config and weights, and neither code that the caller put into the object nor what is frozen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_cluster.errors import BadInputError

LIBRARIES = ("transformers.", "torch.", "peft.", "accelerate.", "transformers_modules.")
SHOWN = 3


def check_comes_back(field: str, model: Any) -> None:
    """model: of transformers. Raises BadInputError, which names `field`."""
    if not isinstance(model, nn.Module):
        return
    if own := _own_code(model):
        raise BadInputError(
            f"{field} is {type(model).__name__} with code of your own in {own}: it is loaded anew from its "
            "config and weights, without that code, and another model would be trained. Give a model of "
            "transformers as it is, or register your class (AutoModelForCausalLM.register)."
        )
    if frozen := _frozen(model):
        more = f" and {len(frozen) - SHOWN} more" if len(frozen) > SHOWN else ""
        raise BadInputError(
            f"{field} has frozen weights beside others (requires_grad=False: {', '.join(frozen[:SHOWN])}"
            f"{more}), and here all weights are trained. Unfreeze them (model.requires_grad_(True)), or "
            "train adapters (LoRA)."
        )


def _own_code(model: nn.Module) -> str:
    """The first class or part of the model that a saved folder does not bring back; nothing if none is."""
    kind = type(model)
    loaded = _loaded_class(model)
    if loaded is kind and not kind.__module__.startswith(LIBRARIES):
        return ""  # registered: whatever it consists of, it is made anew from its config
    if loaded is not None and isinstance(model, loaded) and kind.forward is not loaded.forward:
        return f"{kind.__name__}.forward"
    for name, part in model.named_modules():
        is_hooked = hasattr(part, "_hf_hook")  # of accelerate, which places weights
        if "forward" in vars(part) and not is_hooked:
            return f"{name or kind.__name__}.forward"
        if name and not type(part).__module__.startswith(LIBRARIES):
            return f"{name} ({type(part).__name__})"
    return ""


def _loaded_class(model: nn.Module) -> Any:
    """What AutoModelForCausalLM makes of its config; None where it knows no such config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = type(getattr(model, "config", None))
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(config, None)


def _frozen(model: nn.Module) -> list[str]:
    """Frozen weights that its class does not freeze by itself, where others are not frozen."""
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    if not frozen or len(frozen) == sum(1 for _ in model.parameters()):
        return []
    with torch.device("meta"):
        fresh = type(model)(model.config)
    by_class = {name for name, weight in fresh.named_parameters() if not weight.requires_grad}
    return [name for name in frozen if name not in by_class]
