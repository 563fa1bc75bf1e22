"""A run's exported model in; the caller's own model object with those weights out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_cluster.modeling.loading import load_whole


def put_back(model: Any, folder: Path) -> Any:
    """Load the weights at `folder` into `model`, in place, in its own dtype and on its own device.

    folder: an export: whole weights, or an adapter, which is then put around the model. Returns the model to
    use from now on: `model` itself, or the PeftModel around it.
    """
    if (folder / "adapter_config.json").is_file():
        from peft import PeftModel

        return PeftModel.from_pretrained(model, str(folder))
    fresh = load_whole(type(model), folder, where=f"model={str(folder)!r}:", dtype="auto")
    model.load_state_dict(fresh.state_dict())
    return model
