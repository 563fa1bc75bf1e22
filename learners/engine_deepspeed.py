"""DeepSpeed ZeRO stage 1 to 3 behind the Engine interface: any number of backward passes, then one step.

DeepSpeed averages gradients over ranks, and the interface promises sums, so losses are multiplied by the
number of ranks. The learning rate and the clipping norm are set before each step; DeepSpeed's own schedulers
are not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from learners.engine import StepOutcome, StepSettings, apply_settings, build_adamw, decaying, parameter_groups
from learners.spec import LearnerSpec
from rl_cluster.errors import BadInputError

SHARED_MEMORY_OP = "deepspeed_shm_comm"

PLAIN = (bool, int, float, str, type(None), torch.Tensor)
"""What a checkpoint may hold, so that it can be read without unpickling objects."""


def deepspeed_config(spec: LearnerSpec) -> dict[str, Any]:
    """The JSON config; gradients are accumulated and reduced in float32."""
    bf16 = spec.dtype == "bfloat16"
    zero: dict[str, Any] = {
        "stage": effective_stage(spec),
        "overlap_comm": False,
        "contiguous_gradients": True,
    }
    if spec.persist_below is not None:
        zero["stage3_param_persistence_threshold"] = spec.persist_below
    if spec.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": spec.device == "cuda"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": spec.optimizer.max_grad_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "steps_per_print": 1 << 60,
    }
    if bf16:
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def effective_stage(spec: LearnerSpec) -> int:
    """Stage 1 in bf16 is another optimizer class of DeepSpeed's; stage 2 only adds sharded gradients."""
    return 2 if spec.dtype == "bfloat16" and spec.zero_stage == 1 else spec.zero_stage


class DeepSpeedEngine:
    """One rank of a ZeRO group; torch.distributed must be initialised (one rank too)."""

    def __init__(self, module: nn.Module, spec: LearnerSpec, world_size: int) -> None:
        assert spec.zero_stage >= 1, "stage 0 shards nothing: TorchEngine sums the gradients"
        self.module = module
        self._world_size = world_size
        self._has_gradient = False
        self._stage = effective_stage(spec)
        # An op for inference that takes a compiler, 40 s and shared memory to build; nothing here uses it.
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
        groups = parameter_groups(module, spec.optimizer)
        self._decays = [decaying(group) for group in groups]
        optimizer = build_adamw(groups, spec.optimizer)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=deepspeed_config(spec)
        )

    def forward(self, *inputs: Any) -> Any:
        return self._engine(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        self._has_gradient = True
        self._engine.backward(loss * self._world_size)

    def step(self, settings: StepSettings) -> StepOutcome:
        if settings.weight_decay > 0 and None in self._decays:
            raise BadInputError(
                f"weight_decay {settings.weight_decay}: this learner was started without weight decay, and "
                "ZeRO then holds what decays and what does not in one piece. Start it with "
                "optimizer.weight_decay above 0; every step may then name its own."
            )
        apply_settings(self._zero.param_groups, self._decays, settings)
        self._zero.clip_grad = settings.max_grad_norm
        # DeepSpeed divides gradients by its loss scale, which multiplied none of them here.
        self._zero.loss_scale = 1.0 / settings.gradient_scale
        try:
            self._engine.step()
        finally:
            self._zero.loss_scale = 1.0
        self._has_gradient = False
        norm = float(self._engine.get_global_grad_norm())
        skipped = bool(self._zero.overflow)
        assert skipped or math.isfinite(norm), "DeepSpeed applied a gradient that was not finite"
        return StepOutcome(norm, skipped)

    def forget(self) -> None:
        """Where gradients lie differs by stage and offload; only a step clears all of them, so one is made in
        which the optimizer does nothing."""
        if not self._has_gradient:
            return
        self._zero.optimizer.step = lambda: None
        try:
            self._engine.step()
        finally:
            del self._zero.optimizer.step
        self._has_gradient = False

    def gathered(self, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        result: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(parameters))
        return result

    def shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def own_part(self, parameter: torch.Tensor) -> torch.Tensor:
        """Without the padding of ZeRO-3's last partition, which nobody has written."""
        part = getattr(parameter, "ds_tensor", None)
        if part is None:
            return parameter.detach()
        begun = dist.get_rank() * part.ds_numel
        return part.detach().flatten()[: max(0, parameter.ds_numel - begun)]

    def state(self) -> dict[str, Any]:
        """DeepSpeed's own optimizer state, without the objects that only pickle could restore."""
        return {key: value for key, value in self._zero.state_dict().items() if _is_plain(value)}

    def load_state(self, state: dict[str, Any]) -> None:
        whole = [{**self._zero.state_dict(), **state}] * self._world_size
        if self._stage < 3:
            self._zero.load_state_dict(whole, load_from_fp32_weights=True)
            self._spread_masters()
            return
        self._zero.checkpoint_event_prologue()
        self._zero.load_state_dict(whole)
        self._zero.checkpoint_event_epilogue()

    def _spread_masters(self) -> None:
        """Stages 1 and 2 restore a rank's master weights only; put them into the model, on every rank."""
        zero = self._zero
        for masters, partitions in zip(
            zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups, strict=True
        ):
            partitions[dist.get_rank()].data.copy_(masters.data)
            for rank, partition in enumerate(partitions):
                dist.broadcast(partition.data, src=rank)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in PLAIN
