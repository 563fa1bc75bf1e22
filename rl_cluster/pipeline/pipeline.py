"""The low-level front: every call is checked, queued, and takes effect in the order of submission."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from rl_cluster.errors import BadInputError
from rl_cluster.pipeline.arguments import (
    check_positive_int,
    choose_device,
    copied_arguments,
    norm_limit,
    sample_request,
    within_positions,
)
from rl_cluster.pipeline.backend import Backend, CallableLoss, StepRequest
from rl_cluster.pipeline.checkpoint_folder import check_whole, existing_folder, folder_for, write_folder
from rl_cluster.pipeline.future import AsyncTrainingFuture, Lane, turn_of
from rl_cluster.pipeline.inputs import TokenInputs, token_inputs
from rl_cluster.pipeline.learner_backend import LearnerBackend
from rl_cluster.pipeline.losses import BuiltInLoss, built_in_loss
from rl_cluster.pipeline.torch_backend import TorchBackend


class ForwardBackwardPipeline:
    """Forward-backward passes, optimizer steps, sampling and checkpoints of one model, as futures.

    model: an nn.Module that returns logits, which stays where it is and is trained in place; a
    protocols.Learner; or a LearnerBackend. device: None keeps a model that is on an accelerator there and
    moves others to the GPU if there is one. max_workers: upper limit of threads; the calls of one model
    never overlap, so one is used. gradient_accumulation_steps: optim_step does nothing before so many
    forward_backward calls have been accumulated. tokenizer: only for stop strings in sample().

    Bad arguments raise BadInputError (a ValueError) at once; what fails later raises from the future of its
    own call and leaves parameters, gradients, optimizer, scheduler and random state as they were. Works as a
    context manager. See docs/pipeline.md.
    """

    def __init__(
        self,
        model: Any,
        device: str | torch.device | None = None,
        max_workers: int = 2,
        gradient_accumulation_steps: int = 1,
        *,
        tokenizer: Any = None,
    ) -> None:
        check_positive_int("max_workers", max_workers)
        check_positive_int("gradient_accumulation_steps", gradient_accumulation_steps)
        self.model = model
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.tokenizer = tokenizer
        self.device, self._backend = _backend_of(model, device)
        self._lane = Lane("pipeline", turn_of(model))

    def forward_backward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        labels: Any = None,
        loss_fn: str | Callable[..., Any] = "cross_entropy",
        loss_fn_kwargs: Mapping[str, Any] | None = None,
        *,
        return_gradients: bool = False,
    ) -> AsyncTrainingFuture:
        """Queue a pass whose gradient is added to those since the last step; a ForwardBackwardOutput.

        input_ids: integers [B, L]. attention_mask: [B, L], 1 at tokens, padding on either side. labels:
        [B, L], not shifted, -100 where not to train; None: every token. loss_fn: "cross_entropy",
        "importance_sampling" or "ppo" (losses.py), or f(outputs, labels, **loss_fn_kwargs) that returns a
        scalar, (scalar, metrics) or a WeightedLoss. Per-token arguments are [B, L], aligned on the token.
        """
        if loss_fn_kwargs is not None and not isinstance(loss_fn_kwargs, Mapping):
            raise BadInputError(
                f"loss_fn_kwargs: {type(loss_fn_kwargs).__name__}; give a dict of keyword arguments"
            )
        arguments = dict(loss_fn_kwargs or {})
        loss: BuiltInLoss | CallableLoss
        if isinstance(loss_fn, str):
            tokens = self._tokens(input_ids, attention_mask, labels)
            loss = built_in_loss(loss_fn, arguments, tokens)
        elif callable(loss_fn):
            tokens = self._tokens(input_ids, attention_mask, labels, any_labels=True)
            loss = self._callable_loss("loss_fn", loss_fn, arguments, takes_model=False)
        else:
            raise BadInputError(
                f"loss_fn: {loss_fn!r} is neither a name nor callable; the default is 'cross_entropy'"
            )
        return self._train("forward_backward", tokens, loss, return_gradients)

    def forward_backward_custom(
        self, input_ids: Any, custom_loss_fn: Callable[..., Any], attention_mask: Any = None, **kwargs: Any
    ) -> AsyncTrainingFuture:
        """Queue a pass with f(model, inputs, outputs, **kwargs), which must return a scalar tensor (else a
        ValueError in the future) or a WeightedLoss. inputs: {input_ids, attention_mask (or None)}."""
        if not callable(custom_loss_fn):
            raise BadInputError(
                f"custom_loss_fn: {custom_loss_fn!r} is not callable; give f(model, inputs, outputs)"
            )
        tokens = self._tokens(input_ids, attention_mask, None)
        loss = self._callable_loss("custom_loss_fn", custom_loss_fn, kwargs, takes_model=True)
        return self._train("forward_backward_custom", tokens, loss, return_gradients=False)

    def optim_step(
        self,
        optimizer: Any = None,
        scheduler: Any = None,
        max_grad_norm: float | None = 1.0,
        *,
        flush: bool = False,
    ) -> AsyncTrainingFuture:
        """Queue an update with the accumulated gradient, which is then forgotten; an OptimStepOutput.

        optimizer: of torch, over the model's parameters; on a cluster None or protocols.OptimParams.
        max_grad_norm: L2 norm to clip to, None or 0 for no clipping. With fewer accumulated calls than
        gradient_accumulation_steps nothing happens and metrics["skipped"] is 1; flush=True steps with
        whatever there is. A gradient that is not finite is dropped, nothing else changes.
        """
        self._backend.check_optimizer(optimizer, scheduler)
        calls = 1 if flush else self.gradient_accumulation_steps
        request = StepRequest(optimizer, scheduler, norm_limit(max_grad_norm), calls)
        return self._lane.submit("optim_step", lambda: self._backend.optim_step(request))

    def forward(
        self, input_ids: Any, attention_mask: Any = None, labels: Any = None, *, temperature: float = 1.0
    ) -> AsyncTrainingFuture:
        """Queue a pass without gradient, without dropout; {"logits": [B, L, V], "logprobs": [B, L]}.

        logprobs: of the labels (None: of input_ids), aligned as in ForwardBackwardOutput, fit to be
        the old_logprobs of a later loss. logits: as the model gave them, None on a cluster; the temperature
        acts on logprobs alone.
        """
        return self._forward(input_ids, attention_mask, labels, temperature, reference=False)

    def forward_reference(
        self, input_ids: Any, attention_mask: Any = None, labels: Any = None, *, temperature: float = 1.0
    ) -> AsyncTrainingFuture:
        """As forward, by the reference of a cluster's learner. A model in process has none."""
        return self._forward(input_ids, attention_mask, labels, temperature, reference=True)

    def save_state(self, name: str | Path) -> dict[str, str | None]:
        """Write checkpoints/NAME (an absolute path: there) when the calls queued so far are done.

        Returns {path, model_path, optimizer_path, state_path}; optimizer_path is None before the first
        optim_step. Whole or not at all. Raises CheckpointError.
        """
        folder = folder_for(name)
        saved = self._lane.run("save_state", lambda: write_folder(folder, self._backend.save))
        optimizer = None if saved.optimizer is None else str(folder / saved.optimizer)
        return {
            "path": str(folder),
            "model_path": str(folder / saved.model),
            "optimizer_path": optimizer,
            "state_path": str(folder / saved.state),
        }

    def load_state(self, path: str | Path) -> None:
        """Continue where save_state was called: weights, optimizer, pending gradients, random state.

        path: what save_state returned, or its name. The optimizer's state goes to the optimizer of earlier
        calls, or to the first that comes. Raises BadInputError (no such folder, another model's) or
        CheckpointError (damaged); then nothing has changed.
        """
        folder = existing_folder(path)
        self._lane.run("load_state", lambda: self._load(folder))

    def sample(
        self,
        prompt: Any,
        max_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        stop: Any = None,
        *,
        seed: int | None = None,
    ) -> dict[str, list[Any]]:
        """Draw one continuation with the weights after the calls queued so far; {tokens, logprobs, prompt}.

        prompt: token ids. max_tokens: fewer where the model's positions end. temperature 0: greedy. top_k ≤ 0
        and top_p 1: all tokens. stop: token ids or strings, kept in the tokens; None: the model's own
        end-of-text tokens, []: none. seed: None draws one from torch's generator, so torch.manual_seed
        decides. logprobs: of each token at the temperature (greedy: at 1), before top_k and top_p.
        """
        random = torch.get_rng_state()
        try:
            return self._sample(prompt, max_tokens, temperature, top_k, top_p, stop, seed)
        except BaseException:
            torch.set_rng_state(random)  # the seed was drawn from it
            raise

    def _sample(
        self,
        prompt: Any,
        max_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        stop: Any,
        seed: int | None,
    ) -> dict[str, list[Any]]:
        backend = self._backend
        request = sample_request(
            prompt,
            max_tokens,
            temperature,
            top_k,
            top_p,
            stop,
            seed,
            backend.vocab_size,
            backend.eos_token_ids,
        )
        if backend.max_positions is not None:
            request = within_positions(request, backend.max_positions)
        backend.check_sampling(request.stop_strings, self.tokenizer)
        tokens, logprobs = self._lane.run("sample", lambda: backend.sample(request, self.tokenizer))
        return {"tokens": tokens, "logprobs": logprobs, "prompt": list(request.prompt)}

    def shutdown(self, cancel_pending: bool = False) -> None:
        """Finish the queued calls (or cancel them) and end the threads. May be called twice."""
        self._lane.shutdown(cancel_pending)
        self._backend.close()

    def __enter__(self) -> ForwardBackwardPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(cancel_pending=kind is not None)

    def _load(self, folder: Path) -> None:
        check_whole(folder)
        self._backend.load(folder)

    def _forward(
        self, input_ids: Any, attention_mask: Any, labels: Any, temperature: float, reference: bool
    ) -> AsyncTrainingFuture:
        if (
            isinstance(temperature, bool)
            or not isinstance(temperature, (int, float))
            or not 0 < temperature < float("inf")
        ):
            raise BadInputError(f"temperature: {temperature!r} must be a number above 0; the default is 1.0")
        tokens = self._tokens(input_ids, attention_mask, labels)
        self._backend.check_tokens(tokens, None)
        return self._lane.submit(
            "forward", lambda: self._backend.forward(tokens, float(temperature), reference)
        )

    def _tokens(
        self, input_ids: Any, attention_mask: Any, labels: Any, *, any_labels: bool = False
    ) -> TokenInputs:
        return token_inputs(
            input_ids, attention_mask, labels, self._backend.vocab_size, any_labels=any_labels
        )

    def _callable_loss(
        self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any], takes_model: bool
    ) -> CallableLoss:
        if not self._backend.accepts_callables:
            raise BadInputError(
                f"{name}: a callable cannot run on a cluster's learner; use a built-in loss, or the model in "
                "process"
            )
        return CallableLoss(function, copied_arguments(arguments), takes_model)

    def _train(
        self, label: str, tokens: TokenInputs, loss: BuiltInLoss | CallableLoss, return_gradients: bool
    ) -> AsyncTrainingFuture:
        self._backend.check_tokens(tokens, loss if isinstance(loss, BuiltInLoss) else None)
        return self._lane.submit(
            label, lambda: self._backend.forward_backward(tokens, loss, return_gradients)
        )


def _backend_of(model: Any, device: str | torch.device | None) -> tuple[torch.device | None, Backend]:
    if isinstance(model, nn.Module):
        chosen = choose_device(model, device)
        # A model that is spread over devices is already where it belongs.
        if not getattr(model, "hf_device_map", None):
            with turn_of(model):  # another pipeline may be working on it
                model.to(chosen)
        return chosen, TorchBackend(model, chosen)
    if isinstance(model, (str, Path)) or model is None:
        raise BadInputError(
            f"model: {model!r} is a name; load it with AutoModelForCausalLM.from_pretrained and pass the "
            "model"
        )
    if device is not None:
        raise BadInputError(f"device: {device}; a learner is where its cluster put it, leave device out")
    backend = model if isinstance(model, LearnerBackend) else LearnerBackend(model)
    return None, backend
