"""A learner on a cluster (protocols.Learner) behind the pipeline, driven by its own verbs.

Gradients of a learner are plain sums. forward_backward adds a call's with weight 1 per trained token;
optim_step knows how many tokens there are in all and scales by 1 / Σ tokens: exactly the gradient of one
large batch. The batches since the last step are kept, because a call that fails midway leaves a gradient
that nobody knows: it is forgotten, and what had succeeded is sent once more.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_cluster.errors import BadInputError, CheckpointError, PipelineError
from rl_cluster.pipeline.backend import Accumulation, CallableLoss, SampleRequest, SavedState, StepRequest
from rl_cluster.pipeline.inputs import TokenInputs
from rl_cluster.pipeline.learner_batch import LearnerBatch
from rl_cluster.pipeline.losses import BuiltInLoss
from rl_cluster.pipeline.metrics import loss_metrics
from rl_cluster.pipeline.outputs import ForwardBackwardOutput, OptimStepOutput
from rl_cluster.protocols import (
    ForwardOutput,
    Learner,
    OptimParams,
    OptimResult,
    RolloutWorker,
    WeightPublisher,
)
from rl_cluster.trainers.background import BackgroundLoop
from rl_cluster.trajectory import GroupTask, Prompt, SamplingSpec

LEARNER = "learner"
"""The learner's own part of a checkpoint folder."""
VERBS = ("forward", "forward_backward", "optim_step", "forget_gradient", "save", "load", "ask", "put")


class LearnerBackend:
    """rollout and publisher, together, let sample() draw from an engine; what was trained is published first.

    deadline_seconds: for any one call of the learner, the engine or the publisher.
    """

    accepts_callables = False
    vocab_size: int | None = None
    max_positions: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __init__(
        self,
        learner: Learner,
        rollout: RolloutWorker | None = None,
        publisher: WeightPublisher | None = None,
        deadline_seconds: float = 1800.0,
    ) -> None:
        if missing := [verb for verb in VERBS if not callable(getattr(learner, verb, None))]:
            raise BadInputError(
                f"model: {type(learner).__name__} is no learner, it has no {', '.join(missing)}"
            )
        if (rollout is None) != (publisher is None):
            raise BadInputError(
                "rollout, publisher: sampling needs both, an engine and a way to publish weights to it"
            )
        self.accumulation = Accumulation()
        self.step = 0
        self._learner, self._rollout, self._publisher = learner, rollout, publisher
        self._deadline = deadline_seconds
        self._kept: list[tuple[LearnerBatch, BuiltInLoss]] = []
        self._gradient_is_known = True
        self._published: int | None = None
        self._samples = 0
        self._broken = ""
        self._thread = BackgroundLoop("rl_cluster-learner-calls")

    def check_tokens(self, tokens: TokenInputs, loss: BuiltInLoss | None) -> None:
        LearnerBatch.of(tokens, loss)

    def check_optimizer(self, optimizer: Any, scheduler: Any) -> None:
        if optimizer is not None and not isinstance(optimizer, OptimParams):
            raise BadInputError(
                f"optimizer: {type(optimizer).__name__}; on a cluster the learner has its own, give None or "
                "OptimParams"
            )
        if optimizer is not None:
            optimizer.check()
        if scheduler is not None:
            raise BadInputError(
                "scheduler: on a cluster the learner has its own; give OptimParams(learning_rate=…)"
            )

    def check_sampling(self, stop_strings: tuple[str, ...], tokenizer: Any) -> None:
        del stop_strings, tokenizer  # the engine has a tokenizer of its own
        if self._rollout is None:
            raise BadInputError(
                "sample: no engine to sample from; build LearnerBackend(learner, rollout, publisher)"
            )

    def forward_backward(
        self, tokens: TokenInputs, loss: BuiltInLoss | CallableLoss, return_gradients: bool
    ) -> ForwardBackwardOutput:
        assert isinstance(loss, BuiltInLoss), "accepts_callables is False"
        if return_gradients:
            raise BadInputError(
                "return_gradients: the gradients of a learner stay on the cluster; leave it out"
            )
        started = time.perf_counter()
        self._refuse_broken()
        batch = LearnerBatch.of(tokens, loss)
        sums, logprobs = self._call("forward_backward", self._accumulate(batch, loss))
        count = float(batch.trained.sum())
        self._kept.append((batch, loss))
        self.accumulation.add(count)
        mean = sums["loss_sum"] / count
        metrics = {"loss": mean, "num_tokens": count} | loss_metrics(loss.name, sums)
        metrics["accumulated_steps"] = float(self.accumulation.calls)
        metrics["execution_time"] = time.perf_counter() - started
        return ForwardBackwardOutput(mean, None, batch.padded(logprobs), metrics)

    def optim_step(self, request: StepRequest) -> OptimStepOutput:
        self._refuse_broken()
        calls, params = self.accumulation.calls, request.optimizer or OptimParams()
        if calls < request.min_calls:
            skipped = {"skipped": 1.0, "accumulated_steps": float(calls)}
            return OptimStepOutput(self.step, params.learning_rate or 0.0, 0.0, skipped)
        if params.max_grad_norm is None:
            params = replace(params, max_grad_norm=request.max_grad_norm)
        params = replace(params, gradient_scale=params.gradient_scale / self.accumulation.weight)
        try:
            result = self._call("optim_step", self._step(params))
        except BadInputError:
            raise  # refused before anything changed
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        self._kept.clear()
        self.accumulation.clear()
        self.step += not result.skipped
        metrics = {"skipped": float(result.skipped), "accumulated_steps": float(calls)}
        return OptimStepOutput(self.step, result.learning_rate, result.grad_norm, metrics)

    async def _accumulate(self, batch: LearnerBatch, loss: BuiltInLoss) -> tuple[dict[str, float], Any]:
        """The sums and the log-probabilities [T] of the call."""
        await self._know_gradient()
        self._gradient_is_known = False
        sums, logprobs = await self._send(batch, loss)
        values = await self._learner.ask(_same, logprobs)
        self._gradient_is_known = True
        return sums, values

    async def _step(self, params: OptimParams) -> OptimResult:
        await self._know_gradient()
        return await self._learner.optim_step(params)

    async def _know_gradient(self) -> None:
        """After a failed call: that of the calls that succeeded, and nothing else."""
        if self._gradient_is_known:
            return
        await self._learner.forget_gradient()
        for batch, loss in self._kept:
            await self._send(batch, loss)
        self._gradient_is_known = True

    async def _send(self, batch: LearnerBatch, loss: BuiltInLoss) -> tuple[dict[str, float], Any]:
        reference = self._learner.put(batch.summed)
        rows = range(batch.batch.num_rows)
        return await self._learner.forward_backward(reference, batch.layout, rows, loss.step)

    def forward(
        self, tokens: TokenInputs, temperature: float, reference: bool
    ) -> dict[str, torch.Tensor | None]:
        if temperature != 1.0:
            raise BadInputError(
                f"temperature: {temperature}; a learner's forward uses the one that it was started with"
            )
        batch = LearnerBatch.of(tokens, None)
        return {"logits": None, "logprobs": batch.padded(self._forward(batch, reference).logprobs)}

    def sample(self, request: SampleRequest, tokenizer: Any) -> tuple[list[int], list[float]]:
        del tokenizer
        result: tuple[list[int], list[float]] = self._call("sample", self._sample(request))
        return result

    async def _sample(self, request: SampleRequest) -> tuple[list[int], list[float]]:
        assert self._rollout is not None
        assert self._publisher is not None
        if self._published != self.step:
            await self._publisher.publish(self.step)
            self._published = self.step
        self._samples += 1
        task = GroupTask(
            group_id=-self._samples,  # not of a prompt stream
            prompt=Prompt(f"sample {self._samples}", np.array(request.prompt, dtype=np.int32), ""),
            seeds=(request.seed,),
            sampling=SamplingSpec(
                temperature=request.temperature,
                max_new_tokens=request.max_tokens,
                top_p=request.top_p,
                top_k=request.top_k,
                stop=request.stop_strings,
                stop_token_ids=request.stop_token_ids,
                ignore_eos=request.ignore_eos,
            ),
        )
        _, reference = await self._rollout.rollout(task)
        group = await self._learner.ask(_same, reference)
        trajectory = group.trajectories[0]
        drawn = trajectory.action_mask
        return trajectory.tokens[drawn].tolist(), trajectory.behaviour_logprobs[drawn].tolist()

    def save(self, folder: Path) -> SavedState:
        self._refuse_broken()
        if self.accumulation.calls > 0:
            raise CheckpointError(
                "save_state: a learner does not save gradients that wait for optim_step; call optim_step "
                "first"
            )
        self._call("save", self._learner.save(folder / LEARNER))
        torch.save({"step": self.step}, folder / "state.pt")
        return SavedState(LEARNER, LEARNER, "state.pt")

    def load(self, folder: Path) -> None:
        for part in (folder / LEARNER, folder / "state.pt"):
            if not part.exists():
                raise BadInputError(
                    f"path: {part} is missing; {folder} is no checkpoint of a learner's save_state"
                )
        step = torch.load(folder / "state.pt", weights_only=True)["step"]
        self._call("load", self._load(folder / LEARNER))
        self.step, self._published, self._broken, self._gradient_is_known = step, None, "", True
        self._kept.clear()
        self.accumulation.clear()

    async def _load(self, folder: Path) -> None:
        await self._learner.load(folder)
        await self._learner.forget_gradient()

    def close(self) -> None:
        self._thread.close()

    def _forward(self, batch: LearnerBatch, reference: bool) -> ForwardOutput:
        result: ForwardOutput = self._call("forward", self._forward_values(batch, reference))
        return result

    async def _forward_values(self, batch: LearnerBatch, reference: bool) -> ForwardOutput:
        data = self._learner.put(batch.batch)
        output = await self._learner.forward(data, batch.layout, reference=reference)
        result: ForwardOutput = await self._learner.ask(_same, output)
        return result

    def _call(self, what: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._thread.call(coroutine, what, self._deadline)

    def _refuse_broken(self) -> None:
        if self._broken:
            raise PipelineError(
                f"the learner failed in an optim_step ({self._broken}), what it has accumulated is unknown; "
                "load_state() a saved state"
            )


def _same(value: Any) -> Any:
    """A Ref is resolved as an argument, and comes back as what it refers to."""
    return value
