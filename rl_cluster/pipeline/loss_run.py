"""Tokens and a loss go through the model once; the scalar to differentiate and what is reported come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_cluster.algorithms.inputs import LossInputs
from rl_cluster.algorithms.table import compute_loss
from rl_cluster.errors import BadInputError
from rl_cluster.pipeline.backend import CallableLoss
from rl_cluster.pipeline.inputs import TokenInputs
from rl_cluster.pipeline.losses import BuiltInLoss
from rl_cluster.pipeline.metrics import loss_metrics
from rl_cluster.pipeline.model_call import (
    CausalModel,
    chosen_logits,
    entropies,
    logits_of,
    logprobs_of,
    spread,
    target_logprobs,
    values_of,
)
from rl_cluster.pipeline.outputs import WeightedLoss


@dataclass(frozen=True)
class LossRun:
    """loss: scalar with gradient, mean over `weight` tokens. logits [B, L, V], logprobs [B, L]: no graph."""

    loss: torch.Tensor
    weight: float
    logits: torch.Tensor
    logprobs: torch.Tensor
    metrics: dict[str, Any]


def run_built_in(model: CausalModel, tokens: TokenInputs, loss: BuiltInLoss) -> LossRun:
    """tokens and the loss's columns on the model's device."""
    trained, columns = loss.trained(tokens), loss.columns
    needs_values = "returns" in columns and "values" not in columns
    output = model.run(tokens, with_values=needs_values)
    logits = chosen_logits(logits_of(output), tokens.trained, loss.step.temperature)
    logprobs = target_logprobs(logits, tokens.targets[tokens.trained])
    chosen = trained[tokens.trained]
    rows, places = trained.nonzero(as_tuple=True)
    constants = {name: column[trained].to(logprobs.dtype) for name, column in columns.items()}
    if needs_values:
        constants["values"] = values_of(output)[rows, places - 1]
    count = float(len(rows))
    inputs = LossInputs(
        row=rows,
        num_rows=len(trained),
        logprobs=logprobs[chosen],
        weights=torch.full_like(rows, 1.0 / count, dtype=logprobs.dtype),
        entropy=entropies(logits[chosen]) if loss.needs_entropy else None,
        **constants,
    )
    result = compute_loss(loss.step, inputs)
    return LossRun(
        loss=result.loss,
        weight=count,
        logits=logits_of(output).detach(),
        logprobs=spread(logprobs, tokens.trained),
        metrics={"num_tokens": count} | loss_metrics(loss.name, result.metrics),
    )


def run_callable(model: CausalModel, tokens: TokenInputs, loss: CallableLoss) -> LossRun:
    """The user's function sees the module itself (takes_model) or the labels as they were given."""
    output = model.run(tokens)
    device = tokens.input_ids.device
    arguments = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in loss.arguments.items()
    }
    if loss.takes_model:
        mask = None if tokens.attention_mask is None else tokens.attention_mask.long()
        inputs = {"input_ids": tokens.input_ids, "attention_mask": mask}
        returned = loss.function(model.module, inputs, output, **arguments)
    else:
        returned = loss.function(output, tokens.labels, **arguments)
    scalar, weight, metrics = _unpacked(returned)
    num_tokens = float(tokens.trained.sum())
    return LossRun(
        loss=scalar,
        weight=weight or max(num_tokens, float(len(tokens.trained))),
        logits=logits_of(output).detach(),
        logprobs=logprobs_of(output, tokens),
        metrics={"num_tokens": num_tokens} | dict(metrics),
    )


def _unpacked(returned: Any) -> tuple[torch.Tensor, float | None, Mapping[str, Any]]:
    """(scalar, weight or None, metrics) of what a callable returned. Raises BadInputError."""
    weight, metrics = None, {}
    if isinstance(returned, WeightedLoss):
        weight, metrics = float(returned.weight), returned.metrics
        returned = returned.loss
        if not 0.0 < weight < float("inf"):
            raise BadInputError(
                f"loss_fn: it returned the weight {weight}; give the number of tokens, above 0"
            )
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned, metrics = returned
    if not isinstance(returned, torch.Tensor) or returned.dim() != 0:
        shape = f" of shape {tuple(returned.shape)}" if isinstance(returned, torch.Tensor) else ""
        raise BadInputError(
            f"loss_fn: it must return a scalar tensor, not {type(returned).__name__}{shape}; use loss.mean()"
        )
    if not returned.requires_grad:
        raise BadInputError("loss_fn: the scalar that it returned has no gradient; compute it from outputs")
    return returned, weight, metrics
