"""The high-level front: batches as dictionaries, a policy that trains and a reference that never does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from rl_cluster.errors import BadInputError
from rl_cluster.pipeline.future import AsyncTrainingFuture, turn_of
from rl_cluster.pipeline.losses import PPO_KEYS
from rl_cluster.pipeline.pipeline import ForwardBackwardPipeline

TOKEN_KEYS = ("input_ids", "attention_mask", "labels")


class AsyncTrainingClient:
    """A ForwardBackwardPipeline, and a frozen copy of the reference model beside it.

    reference_model: copied at once, so that neither the caller's object is touched nor later changes of it
    matter (pass the policy itself to keep its present state). It has a thread of its own. On a cluster the
    learner's own reference is used instead, and reference_model must be None.
    A batch is a mapping with input_ids, optionally attention_mask and labels, and the per-token arguments of
    the loss (old_logprobs, advantages, …), which may also be given as loss_fn_kwargs.
    """

    def __init__(
        self,
        model: Any,
        reference_model: nn.Module | None = None,
        device: str | torch.device | None = None,
        gradient_accumulation_steps: int = 1,
        *,
        tokenizer: Any = None,
    ) -> None:
        if reference_model is not None and not isinstance(reference_model, nn.Module):
            raise BadInputError(
                f"reference_model: {type(reference_model).__name__}; give an nn.Module or None"
            )
        in_process = isinstance(model, nn.Module)
        if reference_model is not None and not in_process:
            raise BadInputError("reference_model: a learner on a cluster has its own reference; leave it out")
        frozen = None if reference_model is None else frozen_copy(reference_model)
        self.pipeline = ForwardBackwardPipeline(
            model, device, gradient_accumulation_steps=gradient_accumulation_steps, tokenizer=tokenizer
        )
        self._learner_has_reference = not in_process
        self._reference = None if frozen is None else ForwardBackwardPipeline(frozen, self.pipeline.device)

    @property
    def reference_model(self) -> nn.Module | None:
        """The frozen copy."""
        return None if self._reference is None else self._reference.model

    def forward_backward(
        self,
        batch: Mapping[str, Any],
        loss_fn: str | Callable[..., Any] = "cross_entropy",
        loss_fn_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncTrainingFuture:
        """As ForwardBackwardPipeline.forward_backward."""
        tokens, columns = _parts(batch)
        arguments = dict(loss_fn_kwargs or {})
        if twice := sorted(set(arguments) & set(columns)):
            raise BadInputError(f"loss_fn_kwargs: {twice[0]} is in the batch too; give it once")
        return self.pipeline.forward_backward(**tokens, loss_fn=loss_fn, loss_fn_kwargs=columns | arguments)

    def forward_backward_custom(
        self, batch: Mapping[str, Any], custom_loss_fn: Callable[..., Any], **kwargs: Any
    ) -> AsyncTrainingFuture:
        """As ForwardBackwardPipeline.forward_backward_custom; of the batch only ids and mask are used."""
        tokens, _ = _parts(batch)
        mask = tokens.get("attention_mask")
        return self.pipeline.forward_backward_custom(tokens["input_ids"], custom_loss_fn, mask, **kwargs)

    def forward(
        self, batch: Mapping[str, Any], use_reference: bool = False, *, temperature: float = 1.0
    ) -> AsyncTrainingFuture:
        """As ForwardBackwardPipeline.forward; use_reference: of the frozen model."""
        tokens, _ = _parts(batch)
        if not use_reference:
            return self.pipeline.forward(**tokens, temperature=temperature)
        if self._learner_has_reference:
            return self.pipeline.forward_reference(**tokens, temperature=temperature)
        if self._reference is None:
            raise BadInputError(
                "use_reference: there is no reference model; give reference_model to the client"
            )
        return self._reference.forward(**tokens, temperature=temperature)

    def optim_step(
        self,
        optimizer: Any = None,
        scheduler: Any = None,
        max_grad_norm: float | None = 1.0,
        *,
        flush: bool = False,
    ) -> AsyncTrainingFuture:
        """As ForwardBackwardPipeline.optim_step."""
        return self.pipeline.optim_step(optimizer, scheduler, max_grad_norm, flush=flush)

    def save_state(self, name: str | Path) -> dict[str, str | None]:
        """As ForwardBackwardPipeline.save_state. The reference is not part of it."""
        return self.pipeline.save_state(name)

    def load_state(self, path: str | Path) -> None:
        """As ForwardBackwardPipeline.load_state."""
        self.pipeline.load_state(path)

    def sample(self, prompt: Any, max_tokens: int = 100, **kwargs: Any) -> dict[str, list[Any]]:
        """As ForwardBackwardPipeline.sample."""
        return self.pipeline.sample(prompt, max_tokens, **kwargs)

    custom = forward_backward_custom
    save = save_state
    load = load_state

    def shutdown(self, cancel_pending: bool = False) -> None:
        """Finish (or cancel) what is queued and end all threads. May be called twice."""
        self.pipeline.shutdown(cancel_pending)
        if self._reference is not None:
            self._reference.shutdown(cancel_pending)

    def __enter__(self) -> AsyncTrainingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(cancel_pending=kind is not None)


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that never takes gradients nor drops anything out; the original stays as it is."""
    with turn_of(model):  # a pipeline may be training it
        frozen = copy.deepcopy(model)
    frozen.requires_grad_(False)
    frozen.zero_grad(set_to_none=True)
    return frozen.eval()


def _parts(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ids, mask and labels; the loss's arguments). Raises BadInputError."""
    if not isinstance(batch, Mapping):
        raise BadInputError(
            f"batch: {type(batch).__name__}; give a dict with input_ids, attention_mask, labels"
        )
    if "input_ids" not in batch:
        raise BadInputError(
            f"batch: it has {', '.join(map(str, batch)) or 'nothing'}, but no input_ids; add them"
        )
    for key in batch:
        if key not in TOKEN_KEYS and key not in PPO_KEYS:
            raise BadInputError(
                f"batch: {key!r} is not used; it may hold {', '.join([*TOKEN_KEYS, *sorted(PPO_KEYS)])}"
            )
    tokens = {key: batch[key] for key in TOKEN_KEYS if key in batch}
    return tokens, {key: value for key, value in batch.items() if key not in TOKEN_KEYS}
