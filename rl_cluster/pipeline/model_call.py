"""Checked tokens go through any causal model, log-probabilities of the targets come out.

Works with transformers' models, peft's wrappers and plain modules; each gets the arguments that its forward
names. Legend: B rows, L positions, V vocabulary, A chosen tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_cluster.config.planning.rope import named_in, rope_switch
from rl_cluster.errors import BadInputError, PipelineError
from rl_cluster.modeling.own_attention import mixes_tokens
from rl_cluster.pipeline.inputs import TokenInputs
from rl_cluster.pipeline.trying import TRIED, continues, keeps_padding_out


class CausalModel:
    """A module and what its forward accepts. The module is used as it is, never replaced."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parameters = inspect.signature(module.forward).parameters.values()
        self._names = {p.name for p in parameters}
        self._anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        config = getattr(module, "config", None)
        # A **kwargs of a module without a transformers config says nothing of what it understands.
        self._is_transformers = config is not None and hasattr(config, "model_type")
        self.caches = self._takes("past_key_values") and self._takes("use_cache")
        self.vocab_size = _vocab_size(module)
        self.max_positions = _positive_int(getattr(config, "max_position_embeddings", None))
        self.rope_switch = None if config is None else rope_switch(named_in(config))
        self._continues: bool | None = None
        self._keeps_padding_out: bool | None = None
        self.eos_token_ids = _eos_token_ids(module)

    def _takes(self, name: str) -> bool:
        return name in self._names or (self._anything and self._is_transformers)

    def check(self, tokens: TokenInputs) -> None:
        """Raise BadInputError for padding that this model would take for text."""
        if tokens.left_padded and not self._takes("attention_mask"):
            raise BadInputError(
                "attention_mask: padding before tokens, but this model's forward takes no attention_mask and "
                "would "
                "read it as text; pad on the right"
            )
        length = tokens.input_ids.shape[1]
        if self.max_positions is not None and length > self.max_positions:
            raise BadInputError(
                f"input_ids: {length} tokens in a row, the model has {self.max_positions} positions; shorten "
                "the rows"
            )
        if self.rope_switch is not None and length > self.rope_switch:
            self._check_one_rope(tokens, self.rope_switch)

    def _check_one_rope(self, tokens: TokenInputs, switch: int) -> None:
        mask = tokens.attention_mask
        shortest = tokens.input_ids.shape[1] if mask is None else int(mask.sum(-1).min())
        if shortest <= switch:
            raise BadInputError(
                f"input_ids: rows of {shortest} and {tokens.input_ids.shape[1]} tokens together; this "
                f"model's rotary positions are others for rows of more than {switch} tokens (rope type "
                "longrope or dynamic), and in one call for all. Give long and short rows in separate calls"
            )

    def caches_for(self, prompt: Sequence[int], new: int, device: torch.device) -> bool:
        """Whether what is kept from the first tokens serves the last ones, too; of models that keep more than
        keys and values tried, once."""
        if not self.caches:
            return False
        if self._continues is None:
            length = min(TRIED, self.max_positions or TRIED)
            ids = torch.tensor((list(prompt) * length)[:length], device=device)
            self._continues = (
                length < 2
                or not (self._is_transformers and mixes_tokens(self.module, self.module))
                or continues(self.step, lambda row: logits_of(self._plainly(row, None))[0], ids)
            )
        crosses = self.rope_switch is not None and len(prompt) <= self.rope_switch < len(prompt) + new
        return self._continues and not crosses

    def _refuse_read_padding(self, tokens: TokenInputs) -> None:
        mask = tokens.attention_mask
        if mask is None or not tokens.left_padded:
            return
        if self._keeps_padding_out is None and bool((~mask[:, 0]).any()):
            with evaluating(self.module):
                self._keeps_padding_out = keeps_padding_out(
                    lambda ids, real: logits_of(self._plainly(ids, real))[0], tokens.input_ids, mask
                )
        if self._keeps_padding_out is False:
            raise BadInputError(
                f"attention_mask: padding before tokens, which {type(self.module).__name__} reads as text in "
                "spite of its mask; pad on the right"
            )

    def _plainly(self, ids: torch.Tensor, mask: torch.Tensor | None) -> Any:
        rows = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        left = bool((~rows[:, :-1] & rows[:, 1:]).any())
        return self._call(TokenInputs(ids, mask, ids, rows, None, left))

    def run(self, tokens: TokenInputs, with_values: bool = False) -> Any:
        """The module's own output. with_values: ask a model with a value head for its values."""
        self._refuse_read_padding(tokens)
        return self._call(tokens, with_values)

    def _call(self, tokens: TokenInputs, with_values: bool = False) -> Any:
        arguments: dict[str, Any] = {"input_ids": tokens.input_ids}
        if tokens.attention_mask is not None and self._takes("attention_mask"):
            arguments["attention_mask"] = tokens.attention_mask.long()
        if tokens.position_ids is not None and self._takes("position_ids"):
            arguments["position_ids"] = tokens.position_ids
        if self.caches:
            arguments["use_cache"] = False
        if with_values and "return_value" in self._names:
            arguments["return_value"] = True
        if "input_ids" in self._names or self._anything:
            return self.module(**arguments)
        return self.module(arguments.pop("input_ids"), **arguments)

    def step(self, input_ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Logits [V] after the last of input_ids [1, l], which follow what is in the cache; and the cache."""
        output = self.module(input_ids=input_ids, past_key_values=cache, use_cache=True)
        return logits_of(output)[0, -1], getattr(output, "past_key_values", None)


def logits_of(output: Any) -> torch.Tensor:
    """[B, L, V], from a tensor, a tuple, a mapping or an object with `.logits`."""
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    if logits is None:
        logits = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise BadInputError(
            f"model: it returned {type(output).__name__}, in which there are no logits [batch, length, "
            "vocabulary]; "
            "return them as a tensor, as the first of a tuple or as `.logits`"
        )
    return logits


def values_of(output: Any) -> torch.Tensor:
    """[B, L]: entry i is the value of the state after token i. From `.values`, or the second of a tuple."""
    values = getattr(output, "values", None)
    if callable(values):  # a mapping's method
        values = output.get("values")
    if values is None and isinstance(output, tuple) and len(output) > 1:
        values = output[1]
    if not isinstance(values, torch.Tensor):
        raise BadInputError(
            "values: missing, and the model returns none; pass values [batch, length] in loss_fn_kwargs, or "
            "use a "
            "model with a value head whose output has `.values`"
        )
    return values.squeeze(-1) if values.dim() == 3 else values


def chosen_logits(logits: torch.Tensor, chosen: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 [A, V]: what predicts each chosen token, divided by the temperature. chosen: bool [B, L]."""
    rows, places = chosen.nonzero(as_tuple=True)
    picked = logits[rows, places - 1]
    picked = picked.to(torch.promote_types(picked.dtype, torch.float32))
    return picked if temperature == 1.0 else picked / temperature


def target_logprobs(logits_AV: torch.Tensor, targets_A: torch.Tensor) -> torch.Tensor:
    """[A]: log softmax at the target, in nats."""
    if int(targets_A.max()) >= logits_AV.shape[-1]:
        raise BadInputError(
            f"labels: {int(targets_A.max())} is no token id of this model; its logits end at "
            f"{logits_AV.shape[-1] - 1}"
        )
    return logits_AV.gather(-1, targets_A[:, None])[:, 0] - logits_AV.logsumexp(-1)


def entropies(logits_AV: torch.Tensor) -> torch.Tensor:
    """[A]: −Σ p log p, in nats."""
    logprobs = logits_AV.log_softmax(-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)


def spread(values_A: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[B, L]: the values at the chosen places, 0 elsewhere; detached."""
    result = torch.zeros(chosen.shape, dtype=values_A.dtype, device=values_A.device)
    result[chosen] = values_A.detach()
    return result


@torch.no_grad()
def logprobs_of(output: Any, tokens: TokenInputs, temperature: float = 1.0) -> torch.Tensor:
    """[B, L]: of the targets, 0 where there is none."""
    if not bool(tokens.trained.any()):
        return torch.zeros(tokens.input_ids.shape, device=tokens.input_ids.device)
    picked = chosen_logits(logits_of(output), tokens.trained, temperature)
    return spread(target_logprobs(picked, tokens.targets[tokens.trained]), tokens.trained)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, no dropout and no running statistics; afterwards every submodule is in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def require_finite(loss: torch.Tensor) -> None:
    if not bool(loss.isfinite()):
        raise PipelineError(
            f"the loss is {float(loss.detach())}; its gradient was not accumulated. Look for infinite "
            "logits, or log-"
            "probabilities of another model"
        )


def _vocab_size(module: nn.Module) -> int | None:
    get = getattr(module, "get_input_embeddings", None)
    if get is None:
        return None
    try:
        embeddings = get()
    except NotImplementedError:
        return None  # transformers' way to say that a model has none
    return _positive_int(getattr(embeddings, "num_embeddings", None))


def _positive_int(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _eos_token_ids(module: nn.Module) -> tuple[int, ...]:
    """What ends a text by the model's own account; empty for a plain module."""
    for source in ("generation_config", "config"):
        found = getattr(getattr(module, source, None), "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()
