"""The policy of a PPOTrainer, which may bring its value head: into the folder that workers load, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from learners.whole_weights import VALUE_HEAD
from rl_cluster.modeling.load import VALUE_HEAD_FILE
from rl_cluster.trainers.given import GivenModel, saved
from rl_cluster.trainers.ppo.model import PPOModel


class UserModel(GivenModel):
    """A causal language model or a PPOModel of the caller's, or a name of one."""

    @property
    def base(self) -> Any:
        """Without a value head."""
        return self.module.base_model if isinstance(self.module, PPOModel) else self.module

    def checkpoints_gradients(self) -> bool:
        """Whether the caller has called gradient_checkpointing_enable()."""
        return self.is_loaded and bool(getattr(self.base, "is_gradient_checkpointing", False))

    def save(self, run_dir: Path, tokenizer: Any, name: str = "policy") -> str:
        """The folder or hub name to load; an object is written into the run folder, value head and all."""
        if isinstance(self.source, str):
            return self.source
        folder = saved(self.base, run_dir, tokenizer, name)
        if isinstance(self.module, PPOModel):
            head = {key: value.detach().cpu() for key, value in self.module.value_head.state_dict().items()}
            save_file(head, Path(folder) / VALUE_HEAD_FILE)
        return folder

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy trained weights into the object, in place, in its own dtype and on its own device."""
        own = dict(self.base.named_parameters())
        if isinstance(self.module, PPOModel):
            own |= {VALUE_HEAD + name: p for name, p in self.module.value_head.named_parameters()}
        with torch.no_grad():
            for name, value in weights.items():
                if name in own:
                    own[name].copy_(value)
