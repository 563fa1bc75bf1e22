"""One rank of a learner, without Ray: batches go in, gradients and per-token outputs come out.

Collective calls (forward_part, forward_backward, optim_step, save, load, export, weight_groups) must be made
on every rank of the group in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from learners.building import build_engine, load_model, load_reference
from learners.engine import StepSettings, has_shared_values
from learners.export import export_model
from learners.micro_batch import MicroBatch
from learners.outputs import ForwardPart, LogprobsPart, joined, spread, whole_output
from learners.schedule import learning_rate
from learners.spec import KIND_IN_CHECKPOINTS, LearnerSpec
from learners.state_files import (
    LAYOUT_FILE,
    check_manifest,
    rank_file,
    read_rank_state,
    write_manifest,
    write_rank_state,
)
from learners.weight_groups import WeightMetadata, weight_groups, weight_metadata
from rl_cluster.algorithms.table import LossStep, PolicyStep, compute_loss
from rl_cluster.algorithms.totals import add_metrics
from rl_cluster.batch import TokenBatch
from rl_cluster.errors import NonFiniteError
from rl_cluster.modeling.layout import PackedLayout
from rl_cluster.modeling.policy import PolicyModel
from rl_cluster.protocols import ForwardOutput, OptimParams, OptimResult

MicroBatches = Sequence[Sequence[int]]
PROBE_TOKENS = 4
LARGEST_WEIGHT = 1e18
"""Squares of larger ones overflow in float32, and a norm then makes 0 of everything, finite and useless."""


class LearnerRank:
    """Holds the model and its engine. With several ranks torch.distributed must be initialised before."""

    def __init__(self, spec: LearnerSpec, rank: int = 0, world_size: int = 1) -> None:
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        self.spec, self.rank, self.world_size = spec, rank, world_size
        self.device = torch.device(spec.device)
        torch.manual_seed(spec.seed + rank)
        self.model = load_model(spec).to(self.device)
        self._reference = load_reference(spec, self.model)
        self.engine = build_engine(self.model, spec, world_size)
        self._has_dropout = _has_dropout(self.model)
        self._updates = 0
        self._pending_backwards = 0
        self._values_only = False
        self._warm_up()

    def forward_part(
        self, batch: TokenBatch, micro_batches: MicroBatches, reference: bool
    ) -> tuple[None, ForwardPart]:
        """Outputs of the rows in `micro_batches`. reference: of the frozen copy, with the policy's divergence
        from it; where there is none, of the policy with its adapters switched off.

        The None is what the driver waits for, so that the outputs need not travel to it (as in assemble).
        """
        self._set_training(False)
        parts = []
        with torch.no_grad():
            for rows in micro_batches:
                micro = MicroBatch.of(batch, rows, self.device)
                parts.append((micro.places, self._pass(micro, reference)))
        with_values = self.spec.kind != "policy" and not reference
        with_kl = self._reference is not None and reference
        return None, ForwardPart(
            places=joined([places for places, _ in parts], np.int64),
            logprobs=joined([output[0].cpu().numpy() for _, output in parts]),
            entropy=joined([output[1].cpu().numpy() for _, output in parts]),
            values=joined([output[2].cpu().numpy() for _, output in parts]) if with_values else None,
            kl=joined([output[3].cpu().numpy() for _, output in parts]) if with_kl else None,
        )

    def _pass(self, micro: MicroBatch, reference: bool) -> tuple[Any, ...]:
        """(logprobs, entropy, values, kl)."""
        temperature = self.spec.temperature
        if not reference:
            return *self._run(micro, temperature), None
        if self._reference is None:
            with self.model.reference():
                return *self._run(micro, temperature), None
        frozen = self._reference.next_token(micro.tokens, micro.packed, micro.targets)
        logprobs, entropy = frozen.logprobs(micro.ids, temperature)
        _, kl, _ = self.engine.forward(micro.tokens, micro.packed, micro.targets, temperature, frozen)
        return logprobs, entropy, None, kl

    def assemble(self, num_tokens: int, *parts: ForwardPart) -> tuple[None, ForwardOutput]:
        """The outputs of all ranks as one."""
        return None, whole_output(num_tokens, parts)

    def forward_backward(
        self, batch: TokenBatch, micro_batches: MicroBatches, row_weights: np.ndarray, step: LossStep
    ) -> tuple[dict[str, float], LogprobsPart]:
        """Add this rank's part of the gradient; returns its part of the metrics (sums and extremes) and of
        the log-probabilities that the loss saw.

        row_weights: float64 [N], over the rows of the whole batch. An empty micro-batch adds nothing.
        """
        self._set_training(True)
        values_only = has_shared_values(self.model) and isinstance(step, PolicyStep) and not step.train_policy
        self._values_only = values_only if self._pending_backwards == 0 else self._values_only and values_only
        totals: dict[str, float] = {}
        parts = []
        for rows in micro_batches:
            micro = MicroBatch.of(batch, rows, self.device)
            output = self._run(micro, step.temperature, values_only)
            parts.append((micro.places, output[0].detach()))
            # Every output takes part, at weight 0, so that every parameter gets a gradient on every rank.
            loss = torch.zeros((), device=self.device)
            for column in output:
                loss = loss if column is None else loss + 0.0 * column.sum()
            if len(micro.places) > 0:
                result = compute_loss(step, micro.loss_inputs(batch, row_weights, output))
                loss = loss + result.loss
                add_metrics(totals, self._meant(result.metrics | result.weighted))
            self.engine.backward(loss)
            self._pending_backwards += 1
        return totals, LogprobsPart(
            places=joined([places for places, _ in parts], np.int64),
            logprobs=joined([logprobs.cpu().numpy() for _, logprobs in parts]),
        )

    def assemble_logprobs(self, num_tokens: int, *parts: LogprobsPart) -> tuple[None, np.ndarray]:
        """The log-probabilities of all ranks as one column."""
        return None, spread(num_tokens, parts, [part.logprobs for part in parts])

    def optim_step(self, params: OptimParams) -> OptimResult:
        """Update with the accumulated gradient; a gradient that is not finite changes nothing."""
        assert self._pending_backwards > 0, "optim_step without a forward_backward before it"
        rate = learning_rate(self.spec.optimizer, self._updates, self.spec.total_steps)
        settings = StepSettings.of(self.spec.optimizer, params, rate, self._values_only)
        outcome = self.engine.step(settings)
        self._pending_backwards = 0
        self._updates += not outcome.skipped
        return OptimResult(self._updates, settings.learning_rate, outcome.grad_norm, outcome.skipped)

    def forget_gradient(self) -> None:
        """Drop the gradient that has accumulated, be it nothing."""
        self.engine.forget()
        self._pending_backwards = 0

    def save(self, folder: Path) -> list[str]:
        """This rank's rank-R.pt; rank 0 also learner.json. Accumulated gradients are not saved. Returns the
        names of the files. Raises NonFiniteError for weights that are not worth keeping."""
        self.check_finite()
        write_rank_state(
            folder,
            self.rank,
            {"engine": self.engine.state(), "updates": self._updates, "random": self._random_state()},
        )
        if self.rank > 0:
            return [rank_file(folder, self.rank).name]
        write_manifest(folder, self._layout() | {"updates": self._updates})
        return [rank_file(folder, self.rank).name, LAYOUT_FILE]

    def load(self, folder: Path) -> None:
        """Continue bit for bit where `save` was called, without a gradient. Raises CheckpointError."""
        check_manifest(folder, self._layout())
        state = read_rank_state(folder, self.rank)
        self.forget_gradient()
        self.engine.load_state(state["engine"])
        self._updates = state["updates"]
        torch.set_rng_state(state["random"]["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)

    def export(self, folder: Path) -> None:
        """A Hugging Face folder, or a peft adapter under LoRA; without tokenizer and card. Raises
        NonFiniteError."""
        self.check_finite()
        export_model(self.model, self.weight_groups(), self.engine, folder, writes=self.rank == 0)

    def check_finite(self) -> None:
        """Raise NonFiniteError where this rank's weights, or what the model makes of a few tokens, are not
        finite: finite weights of 1e30 are as spoilt as NaN. Collective."""
        self._set_training(False)
        with torch.no_grad():
            outputs = self.engine.forward(*_few_tokens(self.device))
        logprobs, values = outputs[0], outputs[2]
        # A token that a model never gives has log-probability −∞.
        fine = logprobs is None or bool((logprobs < 1.0).all())
        if not fine or not (values is None or bool(values.isfinite().all())):
            raise NonFiniteError(
                "what the model gives for a few tokens is not finite: its weights are spoilt and are not "
                "saved. Lower optimizer.learning_rate."
            )
        for name, parameter in self.model.named_parameters():
            part = self.engine.own_part(parameter)
            if part.numel() > 0 and not bool(part.detach().abs().max() <= LARGEST_WEIGHT):
                raise NonFiniteError(
                    f"the weights are not finite, or above {LARGEST_WEIGHT:g} ({name}), so they are not "
                    "saved. Lower optimizer.learning_rate."
                )

    def weight_groups(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """(name, whole tensor) of each layer group in turn; see learners/weight_groups.py. Collective."""
        return weight_groups(self.model, self.engine)

    def weight_metadata(self) -> list[WeightMetadata]:
        """Names, shapes and dtypes of what weight_groups yields, in its order. Not collective."""
        return weight_metadata(self.model, self.engine)

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a pure, importable function here."""
        return function(*args)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call function(this rank, *args): for what works on the weights, such as publishing them."""
        return function(self, *args)

    def _run(self, micro: MicroBatch, temperature: float, values_only: bool = False) -> Any:
        """values_only: the values have no gradient to the trunk that they share with the policy."""
        inputs = micro.tokens, micro.packed, micro.targets, temperature
        if micro.target_ids is not None and isinstance(self.model, PolicyModel):
            return self.engine.forward(*inputs, None, values_only, micro.target_ids)
        return self.engine.forward(*inputs, None, True) if values_only else self.engine.forward(*inputs)

    def _meant(self, metrics: dict[str, float]) -> dict[str, float]:
        """With dropout a training pass says nothing about how well the engine agrees with the learner."""
        return {k: v for k, v in metrics.items() if not (self._has_dropout and k in OF_ENGINE_AND_LEARNER)}

    def _set_training(self, training: bool) -> None:
        """Walking through all modules of a small model costs as much as a layer: only on a change."""
        if self.model.training != training:
            self.model.train(training)

    def _warm_up(self) -> None:
        """One forward pass: ZeRO-3 learns the order of the modules before anybody gathers parameters."""
        self.model.eval()
        with torch.no_grad():
            self.engine.forward(*_dummy(self.device))

    def _random_state(self) -> dict[str, torch.Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _layout(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "world_size": self.world_size,
            "engine": spec.engine,
            "zero_stage": spec.zero_stage,
            "dtype": spec.dtype,
            "critic": KIND_IN_CHECKPOINTS[spec.kind],
            "lora_rank": None if spec.lora is None else spec.lora.rank,
        } | ({"value_head": "a parameter group of its own"} if has_shared_values(self.model) else {})


OF_ENGINE_AND_LEARNER = ("gap_sum", "gap_max", "drift_sum", "drift_max")


def _has_dropout(model: nn.Module) -> bool:
    # In some architectures `attention_dropout` is a module itself.
    shares = [
        module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        for module in model.modules()
    ]
    return any(isinstance(share, int | float) and share > 0 for share in shares)


def _dummy(device: torch.device) -> tuple[Any, ...]:
    micro = MicroBatch.of(None, (), device)  # type: ignore[arg-type]
    return micro.tokens, micro.packed, micro.targets, 1.0


def _few_tokens(device: torch.device) -> tuple[Any, ...]:
    """Two ids that every vocabulary has as one sequence, all but its first token drawn."""
    tokens = torch.arange(PROBE_TOKENS, device=device) % 2
    return tokens, PackedLayout.of([PROBE_TOKENS], device), torch.arange(1, PROBE_TOKENS, device=device), 1.0
