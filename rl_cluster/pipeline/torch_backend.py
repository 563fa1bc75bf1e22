"""The model in this process: forward, backward, optimizer step, sampling, state; each undone if it fails.

Gradients of calls are kept as the gradient of one mean. With w the tokens accumulated so far and v those of a
call, both gradients of means, `.grad` becomes (w · old + v · new) / (w + v): at any time what one large batch
of all these calls would give.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_cluster.errors import BadInputError, PipelineError
from rl_cluster.pipeline.backend import Accumulation, CallableLoss, SampleRequest, SavedState, StepRequest
from rl_cluster.pipeline.inputs import TokenInputs
from rl_cluster.pipeline.loss_run import LossRun, run_built_in, run_callable
from rl_cluster.pipeline.losses import BuiltInLoss
from rl_cluster.pipeline.model_call import CausalModel, evaluating, logits_of, logprobs_of, require_finite
from rl_cluster.pipeline.optimizing import (
    check_torch_optimizer,
    clip_into_copies,
    gradient_norm,
    owned_parameters,
)
from rl_cluster.pipeline.outputs import ForwardBackwardOutput, OptimStepOutput
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
        # Only the user's own function gets the chance to write to the weights.
        writable = parameters if isinstance(loss, CallableLoss) else []
        with Rollback(self.module, writable), torch.enable_grad():
            earlier = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            run = self._run(tokens.to(self.device), loss)
            require_finite(run.loss)
            run.loss.backward()
            gradients = self._copies_of_gradients() if return_gradients else None
            self._merge(parameters, earlier, run.weight)
            value = float(run.loss.detach())
        self.accumulation.add(run.weight)
        metrics = {"loss": value, "accumulated_steps": float(self.accumulation.calls)} | run.metrics
        metrics["execution_time"] = time.perf_counter() - started
        return ForwardBackwardOutput(value, run.logits, run.logprobs, metrics, gradients)

    def _run(self, tokens: TokenInputs, loss: BuiltInLoss | CallableLoss) -> LossRun:
        if isinstance(loss, CallableLoss):
            return run_callable(self.model, tokens, loss)
        return run_built_in(self.model, tokens, loss.to(self.device))

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
                _require_finite_weights(owned_parameters(optimizer), rate)
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
            result: tuple[list[int], list[float]] = generate(self.model, request, self.device, tokenizer)
            return result

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


def _require_finite_weights(parameters: Iterable[torch.Tensor], rate: float) -> None:
    if not all(bool(parameter.detach().isfinite().all()) for parameter in parameters):
        raise PipelineError(
            f"optim_step: the update with learning rate {rate:g} makes weights that are not finite, so it "
            "was taken back. Lower the learning rate"
        )
