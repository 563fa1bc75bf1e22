"""The trained modules: a policy (optionally with a value head on its trunk) and a separate critic.

Enters: packed tokens, their layout, which of them were drawn. Leaves: (log-probabilities, entropies, values),
float32 [A] each with gradient, one entry per drawn token; values of the state before it, None without a head.
A plain tuple, because ZeRO-3's hooks must find the tensors in it. Legend: T packed tokens, A drawn tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from rl_cluster.modeling.packed import PackedLayout, packed_hidden_states
from rl_cluster.modeling.token_logprobs import token_logprobs

Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""logprobs, entropy, values."""


class ValueHead(nn.Module):
    """hidden → ReLU → scalar. The last layer starts at 0, so that an untrained critic says 0."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden = nn.Linear(hidden_size, hidden_size, dtype=dtype)
        self.scalar = nn.Linear(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.scalar.weight)
        nn.init.zeros_(self.scalar.bias)

    def forward(self, hidden_AD: torch.Tensor) -> torch.Tensor:
        """float32 [A]."""
        return self.scalar(torch.relu(self.hidden(hidden_AD)))[:, 0].float()


class LogprobHead(nn.Module):
    """The language-model head as a module that owns its weight, called once per forward pass.

    ZeRO-3 gathers a module's own parameters around its forward and backward: one gather per micro-batch,
    however many chunks the logits are computed in (ranks may differ in that).
    """

    def __init__(self, lm_head: nn.Linear) -> None:
        super().__init__()
        self.weight = lm_head.weight
        self.bias = lm_head.bias

    def forward(
        self, hidden_AD: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(hidden_AD, self.weight, self.bias, targets, temperature)


class PolicyModel(nn.Module):
    """lm: a causal language model of transformers (or peft's wrapper of one) loaded with packed attention."""

    def __init__(self, lm: nn.Module, value_head: bool) -> None:
        super().__init__()
        self.lm = lm
        base = base_model(lm)
        self.logprob_head = LogprobHead(base.get_output_embeddings())
        self.value_head = None
        if value_head:
            self.value_head = ValueHead(base.config.hidden_size, self.logprob_head.weight.dtype)

    def forward(
        self, tokens: torch.Tensor, packed: PackedLayout, targets: torch.Tensor, temperature: float
    ) -> Output:
        """tokens: int64 [T]. targets: int64 [A], places of the drawn tokens in the packed order; never the
        first of a sequence. temperature: the logits are divided by it, in float32."""
        hidden = packed_hidden_states(base_model(self.lm).get_decoder(), tokens, packed)
        before = packed.states_at(hidden, targets - 1)
        logprobs, entropy = self.logprob_head(before, tokens[targets], temperature)
        values = None if self.value_head is None else self.value_head(before)
        return logprobs, entropy, values

    def reference(self) -> AbstractContextManager[None]:
        """Inside, the adapters are off: the model is the one that training started from."""
        return self.lm.disable_adapter() if is_lora(self.lm) else nullcontext()  # type: ignore[operator]


class CriticModel(nn.Module):
    """A trunk of its own with a value head; its log-probabilities and entropies are 0.

    trunk: a decoder of transformers (no language-model head) loaded with packed attention.
    """

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = ValueHead(trunk.config.hidden_size, next(trunk.parameters()).dtype)

    def forward(
        self, tokens: torch.Tensor, packed: PackedLayout, targets: torch.Tensor, temperature: float
    ) -> Output:
        """As PolicyModel.forward; temperature has no effect."""
        del temperature
        hidden = packed_hidden_states(self.trunk, tokens, packed)
        values = self.value_head(packed.states_at(hidden, targets - 1))
        zeros = torch.zeros_like(values)
        return zeros, zeros, values

    def reference(self) -> AbstractContextManager[None]:
        """A critic has no reference form."""
        return nullcontext()


def is_lora(lm: nn.Module) -> bool:
    return hasattr(lm, "peft_config")


def base_model(lm: nn.Module) -> nn.Module:
    """The causal language model itself, adapters injected but without peft's wrapper."""
    return lm.get_base_model() if is_lora(lm) else lm  # type: ignore[operator]
