"""The model in this process: forward, backward, optimizer step, sampling, state; each undone if it fails.

Gradients of calls are kept as the gradient of one mean. With w the tokens accumulated so far and v those of a
call, both gradients of means, `.grad` becomes (w · old + v · new) / (w + v): at any time what one large batch
of all these calls would give.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_cluster.algorithms.inputs import LossInputs
from rl_cluster.algorithms.table import compute_loss
from rl_cluster.errors import BadInputError
from rl_cluster.pipeline.backend import Accumulation, CallableLoss, SampleRequest, SavedState, StepRequest
from rl_cluster.pipeline.inputs import TokenInputs
from rl_cluster.pipeline.losses import BuiltInLoss
from rl_cluster.pipeline.metrics import loss_metrics
from rl_cluster.pipeline.model_call import (
    CausalModel,
    chosen_logits,
    entropies,
    evaluating,
    logits_of,
    logprobs_of,
    require_finite,
    spread,
    target_logprobs,
    values_of,
)
from rl_cluster.pipeline.optimizing import (
    check_torch_optimizer,
    clip_into_copies,
    gradient_norm,
    owned_parameters,
)
from rl_cluster.pipeline.outputs import ForwardBackwardOutput, OptimStepOutput, WeightedLoss
from rl_cluster.pipeline.rollback import Rollback
from rl_cluster.pipeline.sampling import generate
from rl_cluster.pipeline.torch_state import TorchState, read_torch_state, write_torch_state


class TorchBackend:
    accepts_callables = True

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.model = CausalModel(module)
        self.vocab_size = self.model.vocab_size
        self.max_positions = self.model.max_positions
        self.eos_token_ids = self.model.eos_token_ids
        self.accumulation = Accumulation()
        self.step = 0
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._unclaimed: dict[str, Any] | None = None

    def check_tokens(self, tokens: TokenInputs, loss: BuiltInLoss | None) -> None:
        del loss
        self.model.check(tokens)

    def check_optimizer(self, optimizer: Any, scheduler: Any) -> None:
        check_torch_optimizer(optimizer, scheduler, self.module)

    def check_sampling(self, stop_strings: tuple[str, ...], tokenizer: Any) -> None:
        if stop_strings and tokenizer is None:
            raise BadInputError(
                f"stop: {stop_strings[0]!r} is a string and the pipeline has no tokenizer to read it with; "
                "pass "
                "tokenizer= to the pipeline, or token ids"
            )

    def forward_backward(
        self, tokens: TokenInputs, loss: BuiltInLoss | CallableLoss, return_gradients: bool
    ) -> ForwardBackwardOutput:
        started = time.perf_counter()
        self._forget_if_zeroed()
        parameters = list(self.module.parameters())
        callable_loss = isinstance(loss, CallableLoss)
        # Only the user's own function gets the chance to write to the weights.
        with Rollback(self.module, parameters if callable_loss else []), torch.enable_grad():
            earlier = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            tokens = tokens.to(self.device)
            run = self._run_callable if isinstance(loss, CallableLoss) else self._run_built_in
            mean, weight, unit, output, metrics = run(tokens, loss)  # type: ignore[arg-type, operator]
            require_finite(mean)
            mean.backward()
            gradients = self._copies_of_gradients() if return_gradients else None
            self._merge(parameters, earlier, weight)
            logprobs = metrics.pop("logprobs", None)
            if logprobs is None:
                logprobs = logprobs_of(output, tokens)
            value, logits = float(mean.detach()), logits_of(output).detach()
        self.accumulation.add(weight, unit)
        metrics = {"loss": value, "num_tokens": float(tokens.trained.sum())} | metrics
        metrics["accumulated_steps"] = float(self.accumulation.calls)
        metrics["execution_time"] = time.perf_counter() - started
        return ForwardBackwardOutput(value, logits, logprobs, metrics, gradients)

    def _run_built_in(
        self, tokens: TokenInputs, loss: BuiltInLoss
    ) -> tuple[Any, float, str, Any, dict[str, Any]]:
        self.accumulation.check_unit("tokens")
        columns = {name: column.to(self.device) for name, column in loss.columns.items()}
        trained = loss.trained(tokens) if loss.mask is None else tokens.trained & loss.mask.to(self.device)
        needs_values = "returns" in columns and "values" not in columns
        output = self.model.run(tokens, with_values=needs_values)
        logits = chosen_logits(logits_of(output), tokens.trained, loss.step.temperature)
        logprobs = target_logprobs(logits, tokens.targets[tokens.trained])
        chosen = trained[tokens.trained]
        rows, places = trained.nonzero(as_tuple=True)
        wants_entropy = getattr(getattr(loss.step, "loss", None), "entropy_coef", 0.0) > 0
        constants = {name: column[trained].to(logprobs.dtype) for name, column in columns.items()}
        if needs_values:
            constants["values"] = values_of(output)[rows, places - 1]
        result = compute_loss(
            loss.step,
            LossInputs(
                row=rows,
                num_rows=len(trained),
                logprobs=logprobs[chosen],
                weights=torch.full_like(logprobs[chosen], 1.0 / len(rows)).detach(),
                entropy=entropies(logits[chosen]) if wants_entropy else None,
                **constants,
            ),
        )
        metrics = loss_metrics(loss.name, result.metrics)
        return (
            result.loss,
            float(len(rows)),
            "tokens",
            output,
            metrics
            | {
                "num_tokens": float(len(rows)),
                "logprobs": spread(logprobs, tokens.trained),
            },
        )

    def _run_callable(
        self, tokens: TokenInputs, loss: CallableLoss
    ) -> tuple[Any, float, str, Any, dict[str, Any]]:
        output = self.model.run(tokens)
        arguments = {
            key: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for key, value in loss.arguments.items()
        }
        if loss.takes_model:
            mask = None if tokens.attention_mask is None else tokens.attention_mask.long()
            inputs = {"input_ids": tokens.input_ids, "attention_mask": mask}
            returned = loss.function(self.module, inputs, output, **arguments)
        else:
            returned = loss.function(output, tokens.labels, **arguments)
        scalar, weight, unit, metrics = _unpacked(returned)
        self.accumulation.check_unit(unit)
        return scalar, weight, unit, output, dict(metrics)

    def _merge(self, parameters: list[nn.Parameter], earlier: list[Any], weight: float) -> None:
        before = self.accumulation.weight
        if before == 0.0:
            return
        total = before + weight
        for parameter, old in zip(parameters, earlier, strict=True):
            new = parameter.grad
            if new is not None:
                new.mul_(weight / total)
                if old is not None:
                    new.add_(old, alpha=before / total)
            elif old is not None:
                parameter.grad = old * (before / total)

    def _forget_if_zeroed(self) -> None:
        """optimizer.zero_grad() between calls throws the accumulated gradient away, so forget its weight."""
        if self.accumulation.calls > 0 and all(p.grad is None for p in self.module.parameters()):
            self.accumulation.clear()

    def _copies_of_gradients(self) -> dict[str, torch.Tensor]:
        named = self.module.named_parameters()
        return {name: p.grad.detach().clone() for name, p in named if p.grad is not None}

    def optim_step(self, request: StepRequest) -> OptimStepOutput:
        self._forget_if_zeroed()
        optimizer, scheduler, calls = request.optimizer, request.scheduler, self.accumulation.calls
        rate = float(optimizer.param_groups[0]["lr"])
        if calls < request.min_calls:
            return OptimStepOutput(self.step, rate, 0.0, {"skipped": 1.0, "accumulated_steps": float(calls)})
        with Rollback(self.module, owned_parameters(optimizer), optimizer, scheduler):
            self._claim(optimizer, scheduler)
            rate = float(optimizer.param_groups[0]["lr"])
            norm = gradient_norm(optimizer)
            finite = bool(torch.tensor(norm).isfinite())
            if finite:
                clip_into_copies(optimizer, norm, request.max_grad_norm)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
        for parameter in [*self.module.parameters(), *owned_parameters(optimizer)]:
            parameter.grad = None
        self._optimizer, self._scheduler, self._unclaimed = optimizer, scheduler or self._scheduler, None
        self.accumulation.clear()
        self.step += finite
        next_rate = float(optimizer.param_groups[0]["lr"])
        metrics = {
            "skipped": float(not finite),
            "accumulated_steps": float(calls),
            "next_learning_rate": next_rate,
        }
        return OptimStepOutput(self.step, rate, norm, metrics)

    def _claim(self, optimizer: Any, scheduler: Any) -> None:
        """State that was loaded before any optimizer was known belongs to the first one that comes."""
        if self._unclaimed is None:
            return
        optimizer.load_state_dict(self._unclaimed["optimizer"])
        if scheduler is not None and self._unclaimed["scheduler"] is not None:
            scheduler.load_state_dict(self._unclaimed["scheduler"])

    def forward(
        self, tokens: TokenInputs, temperature: float, reference: bool
    ) -> dict[str, torch.Tensor | None]:
        if reference:
            raise BadInputError("use_reference: this pipeline has no reference model; give one to the client")
        with Rollback(self.module, []), torch.no_grad(), evaluating(self.module):
            tokens = tokens.to(self.device)
            output = self.model.run(tokens)
            return {"logits": logits_of(output), "logprobs": logprobs_of(output, tokens, temperature)}

    def sample(self, request: SampleRequest, tokenizer: Any) -> tuple[list[int], list[float]]:
        with Rollback(self.module, []), evaluating(self.module):
            return generate(self.model, request, self.device, tokenizer)

    def save(self, folder: Path) -> SavedState:
        state = TorchState(self.step, self.accumulation, self._optimizer, self._scheduler, self._unclaimed)
        return write_torch_state(folder, self.module, self.device, state)

    def load(self, folder: Path) -> None:
        optimizer = [] if self._optimizer is None else owned_parameters(self._optimizer)
        parameters = [*self.module.parameters(), *optimizer]
        with Rollback(self.module, parameters, self._optimizer, self._scheduler):
            state = read_torch_state(folder, self.module, self.device, self._optimizer, self._scheduler)
        self.step, self.accumulation, self._unclaimed = state.step, state.accumulation, state.unclaimed

    def close(self) -> None:
        return None


def _unpacked(returned: Any) -> tuple[torch.Tensor, float, str, Mapping[str, Any]]:
    """(scalar, weight, unit, metrics) of what a callable returned."""
    weight, unit, metrics = 1.0, "calls", {}
    if isinstance(returned, WeightedLoss):
        weight, unit, metrics = float(returned.weight), "tokens", returned.metrics
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
            f"loss_fn: it returned {type(returned).__name__}{shape}; return a scalar tensor, such as "
            "loss.mean()"
        )
    if not returned.requires_grad:
        raise BadInputError(
            "loss_fn: the scalar that it returned has no gradient; compute it from the outputs"
        )
    return returned, weight, unit, metrics
