"""A user's model in; the folder that the workers load, and in the end the trained weights in that object."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from learners.whole_weights import VALUE_HEAD
from rl_cluster.modeling.load import VALUE_HEAD_FILE
from rl_cluster.modeling.loading import load_whole
from rl_cluster.trainers.online_checks import max_positions, num_parameters
from rl_cluster.trainers.ppo.arguments import ModelSource
from rl_cluster.trainers.ppo.model import PPOModel
from rl_cluster.trainers.session import save_start


class UserModel:
    """A model object of the caller's, or a name of one, which is only loaded when it is looked at."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._module: torch.nn.Module | None = None if isinstance(source, str) else source

    @property
    def module(self) -> Any:
        """The object itself; one that was named is loaded now."""
        if self._module is None:
            from transformers import AutoModelForCausalLM

            assert isinstance(self.source, str)
            self._module = load_whole(
                AutoModelForCausalLM, self.source, where=f"PPOTrainer.model={self.source!r}:"
            )
        return self._module

    @property
    def is_loaded(self) -> bool:
        return self._module is not None

    @property
    def name(self) -> str | None:
        """The folder or hub name that its tokenizer may be found under."""
        return self.source if isinstance(self.source, str) else str(self.base.config._name_or_path) or None

    @property
    def base(self) -> Any:
        """Without a value head."""
        return self.module.base_model if isinstance(self.module, PPOModel) else self.module

    def num_parameters(self) -> int | None:
        """None where nothing is known without the network."""
        return num_parameters(self._known)

    def max_positions(self) -> int | None:
        """None where unknown."""
        return max_positions(self._known)

    @property
    def _known(self) -> Any:
        """What can be looked at without loading anything."""
        return self.base if self.is_loaded else self.source

    def checkpoints_gradients(self) -> bool:
        """Whether the caller has called gradient_checkpointing_enable()."""
        return self.is_loaded and bool(getattr(self.base, "is_gradient_checkpointing", False))

    def save(self, run_dir: Path, tokenizer: Any, name: str = "policy") -> str:
        """The folder or hub name to load; an object is written into the run folder, value head and all."""
        if isinstance(self.source, str):
            return self.source
        folder = save_start(run_dir, self.base, tokenizer, name)
        if isinstance(self.module, PPOModel):
            head = {key: value.detach().cpu() for key, value in self.module.value_head.state_dict().items()}
            save_file(head, folder / VALUE_HEAD_FILE)
        return str(folder)

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy trained weights into the object, in place, in its own dtype and on its own device."""
        own = dict(self.base.named_parameters())
        if isinstance(self.module, PPOModel):
            own |= {VALUE_HEAD + name: p for name, p in self.module.value_head.named_parameters()}
        with torch.no_grad():
            for name, value in weights.items():
                if name in own:
                    own[name].copy_(value)
