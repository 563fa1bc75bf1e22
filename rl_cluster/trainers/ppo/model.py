"""The actor and the critic as one module: a causal language model in, logits and values per token out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_cluster.checks import check_whole_number
from rl_cluster.errors import BadInputError
from rl_cluster.modeling import policy


class ValueHead(policy.ValueHead):
    """Linear → ReLU → Linear(1), float32 out. The same weights as the learner's, so they can be exchanged.

    The last layer starts at 0: an untrained critic says 0.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        check_whole_number("ValueHead.hidden_size", hidden_size)
        super().__init__(hidden_size, dtype)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """float32 [...] of hidden states [..., hidden_size]."""
        hidden = hidden_states.to(self.scalar.weight.dtype)
        return self.scalar(torch.relu(self.hidden(hidden)))[..., 0].float()


class PPOModel(nn.Module):
    """A causal language model of transformers with a value head on its trunk; `base_model`, `value_head`."""

    def __init__(self, base_model: Any) -> None:
        """Raises BadInputError for what has no hidden states to put a head on."""
        super().__init__()
        size = getattr(getattr(base_model, "config", None), "hidden_size", None)
        if not isinstance(base_model, nn.Module) or size is None or not hasattr(base_model, "get_decoder"):
            raise BadInputError(
                f"PPOModel.base_model={type(base_model).__name__}: give a causal language model of "
                "transformers, such as AutoModelForCausalLM.from_pretrained(model_name)."
            )
        self.base_model = base_model
        parameter = next(base_model.parameters())
        self.value_head = ValueHead(size, parameter.dtype).to(parameter.device)

    @property
    def config(self) -> Any:
        """Of the base model."""
        return self.base_model.config

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        return_value: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """logits [B, L, V]; with return_value also values, float32 [B, L].

        Entry t of both is about what follows token t: the value is that of the state after token t, the
        logits are those of token t + 1. What it says of padding means nothing.
        """
        output = self.base_model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=return_value
        )
        if not return_value:
            return output.logits
        return output.logits, self.value_head(output.hidden_states[-1])
