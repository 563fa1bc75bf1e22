"""The trained modules: a policy (optionally with a value head on its trunk) and a separate critic.

Enters: packed tokens, their layout, which of them were drawn. Leaves: (log-probabilities, entropies, values),
float32 [A] each with gradient, one entry per drawn token; values of the state before it, None without a head.
A plain tuple, because ZeRO-3's hooks must find the tensors in it. Legend: T packed tokens, A drawn tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from rl_cluster.algorithms.kl import exact_kl
from rl_cluster.modeling.layout import PackedLayout
from rl_cluster.modeling.logit_map import IDENTITY, LogitMap
from rl_cluster.modeling.packed import decoder_of, packed_hidden_states
from rl_cluster.modeling.token_logprobs import chunk_size, logits_of, token_logprobs

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


@dataclass(frozen=True)
class NextToken:
    """A model's distributions of A next tokens, not computed yet: states [A, D], head [V, D], bias [V],
    and what the model does to its logits."""

    states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    logit_map: LogitMap = IDENTITY

    def logprobs(self, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """As token_logprobs."""
        return token_logprobs(
            self.states, self.weight, self.bias, targets, temperature, logit_map=self.logit_map
        )

    def logits(self, rows: slice, temperature: float) -> torch.Tensor:
        """As logits_of, of these rows of the states."""
        return logits_of(self.states[rows], self.weight, self.bias, temperature, self.logit_map)


class LogprobHead(nn.Module):
    """The language-model head as a module that owns its weight, called once per forward pass.

    ZeRO-3 gathers a module's own parameters around its forward and backward: one gather per micro-batch,
    however many chunks the logits are computed in (ranks may differ in that).
    """

    def __init__(self, lm_head: nn.Linear, logit_map: LogitMap = IDENTITY) -> None:
        super().__init__()
        self.weight = lm_head.weight
        self.bias = lm_head.bias
        self.logit_map = logit_map

    def next_token(self, hidden_AD: torch.Tensor) -> NextToken:
        """The distributions that follow these states."""
        return NextToken(hidden_AD, self.weight, self.bias, self.logit_map)

    def forward(
        self,
        hidden_AD: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        reference: NextToken | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With a reference: the divergence from it in place of the entropy, without gradient."""
        own = self.next_token(hidden_AD)
        if reference is None:
            return own.logprobs(targets, temperature)
        return own.logprobs(targets, temperature)[0], divergence(own, reference, temperature)


class PolicyModel(nn.Module):
    """lm: a causal language model of transformers (or peft's wrapper of one); packed where its attention is
    packed.ATTENTION, else as padded rows. logit_map: as the model's config says, unless given."""

    def __init__(self, lm: nn.Module, value_head: bool, logit_map: LogitMap | None = None) -> None:
        super().__init__()
        self.lm = lm
        base = base_model(lm)
        self.logprob_head = LogprobHead(base.get_output_embeddings(), logit_map or LogitMap.of(base.config))
        self.value_head = None
        if value_head:
            weight = self.logprob_head.weight
            self.value_head = ValueHead(weight.shape[1], weight.dtype)

    def forward(
        self,
        tokens: torch.Tensor,
        packed: PackedLayout,
        targets: torch.Tensor,
        temperature: float,
        reference: NextToken | None = None,
        values_only: bool = False,
        target_ids: torch.Tensor | None = None,
    ) -> Output:
        """tokens: int64 [T]. targets: int64 [A], places of the drawn tokens in the packed order; never the
        first of a sequence. temperature: the logits are divided by it, in float32. reference: see
        LogprobHead. values_only: the values have a gradient of 0 to everything but their own head.
        target_ids: int64 [A] or [A, K], whose log-probabilities are asked for; None: the drawn tokens'."""
        before = self._states(tokens, packed, targets)
        ids = tokens[targets] if target_ids is None else target_ids
        logprobs, entropy = self.logprob_head(before, ids, temperature, reference)
        if self.value_head is None:
            return logprobs, entropy, None
        # Times 0, and not only detached: ZeRO-3 wants every module's backward pass.
        return logprobs, entropy, self.value_head(before.detach() + 0.0 * before if values_only else before)

    def next_token(self, tokens: torch.Tensor, packed: PackedLayout, targets: torch.Tensor) -> NextToken:
        """The distributions that the targets were drawn from. Of whole weights only, not under ZeRO-3."""
        return self.logprob_head.next_token(self._states(tokens, packed, targets))

    def _states(self, tokens: torch.Tensor, packed: PackedLayout, targets: torch.Tensor) -> torch.Tensor:
        hidden = packed_hidden_states(decoder_of(base_model(self.lm)), tokens, packed)
        return packed.states_at(hidden, targets - 1)

    def reference(self) -> AbstractContextManager[None]:
        """Inside, the adapters are off: the model is the one that training started from."""
        return self.lm.disable_adapter() if is_lora(self.lm) else nullcontext()


@torch.no_grad()
def divergence(policy: NextToken, reference: NextToken, temperature: float) -> torch.Tensor:
    """float32 [A]: exact_kl of each next token, chunk by chunk over the tokens."""
    chunk = chunk_size(policy.states, policy.weight)
    parts = []
    for start in range(0, policy.states.shape[0], chunk):
        rows = slice(start, start + chunk)
        own, other = (model.logits(rows, temperature) for model in (policy, reference))
        parts.append(exact_kl(own.log_softmax(-1), other.log_softmax(-1)))
    return torch.cat([torch.zeros(0, device=policy.states.device), *parts])


class CriticModel(nn.Module):
    """A trunk of its own with a value head; its log-probabilities and entropies are 0.

    trunk: a decoder of transformers (no language-model head), packed or not as in PolicyModel.
    """

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = ValueHead(
            trunk.config.get_text_config().hidden_size, next(trunk.parameters()).dtype
        )

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
    return lm.get_base_model() if is_lora(lm) else lm
