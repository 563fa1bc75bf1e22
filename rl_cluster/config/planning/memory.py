"""Estimates of memory: sizes of model and batch in, bytes per worker out, part by part. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from rl_cluster.config.planning.machine import GIB
from rl_cluster.config.planning.model_shape import ModelShape

ENGINE_BASE = int(1.4 * GIB)
"""A Ray actor and vLLM's engine process with their libraries, before any weights."""
LEARNER_BASE = int(0.9 * GIB)
REFERENCE_BASE = int(0.7 * GIB)
SCORER_BASE = int(0.3 * GIB)
BYTES = {"float32": 4, "bfloat16": 2}
LOGITS_IN_CHUNK = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Elements of logits that exist at once, see rl_cluster/modeling/token_logprobs.py."""


@dataclass(frozen=True)
class Memory:
    """parts: (what, bytes). on_gpu: of one GPU, else of the machine's memory."""

    parts: tuple[tuple[str, int], ...]
    on_gpu: bool

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


def engine_memory(shape: ModelShape, dtype: str, kv_bytes: int, tensor_parallel: int, on_gpu: bool) -> Memory:
    """weights / tensor parallel + KV cache; kv_bytes: what the engine is given, of one worker."""
    weights = shape.num_parameters * BYTES[dtype] // tensor_parallel
    base = () if on_gpu else (("process", ENGINE_BASE),)
    return Memory((*base, ("weights", weights), ("KV cache", kv_bytes)), on_gpu)


def kv_cache_tokens(shape: ModelShape, dtype: str, kv_bytes: int) -> int:
    """Tokens that fit: kv_bytes / (2 × layers × KV heads × head size × bytes)."""
    return kv_bytes // (shape.kv_values_per_token * BYTES[dtype])


@dataclass(frozen=True)
class LearnerSizes:
    """What the learner's memory depends on. trained: parameters with gradients (adapters under LoRA).
    with_reference: a whole frozen copy on each rank."""

    trained: int
    dtype: str
    zero_stage: int
    num_ranks: int
    micro_batch_tokens: int
    gradient_checkpointing: bool
    offload_optimizer: bool
    with_reference: bool = False


def learner_memory(shape: ModelShape, sizes: LearnerSizes, on_gpu: bool) -> Memory:
    """One rank, following Rajbhandari et al. 2020 (ZeRO): weights b·P, gradients b·T, optimizer 12·T (float32
    master weights and two moments), each divided by the ranks from stage 3, 2 and 1 on; b bytes per value,
    P parameters, T trained ones. Plus activations, see `activation_bytes`.
    """
    width = BYTES[sizes.dtype]
    parts = {stage: sizes.num_ranks if sizes.zero_stage >= stage else 1 for stage in (1, 2, 3)}
    optimizer = 0 if sizes.offload_optimizer and on_gpu else 12 * sizes.trained // parts[1]
    base = () if on_gpu else (("process", LEARNER_BASE),)
    activations = activation_bytes(shape, sizes.micro_batch_tokens, width, sizes.gradient_checkpointing)
    activations += 3 * logits_bytes(shape, sizes.micro_batch_tokens, on_gpu)
    return Memory(
        (
            *base,
            ("weights", shape.num_parameters * width // parts[3]),
            ("gradients", sizes.trained * width // parts[2]),
            ("optimizer", optimizer),
            ("activations", activations),
            *((("reference", shape.num_parameters * width),) if sizes.with_reference else ()),
        ),
        on_gpu,
    )


def activation_bytes(shape: ModelShape, tokens: int, width: int, checkpointing: bool) -> int:
    """17·b·tokens·hidden per layer (Korthikanti et al. 2022, table 2, without the attention matrix), or b of
    each layer and 17·b of one with checkpointing. Without the logits."""
    per_layer = 17 * width * tokens * shape.hidden_size
    stored = width * tokens * shape.hidden_size
    return stored * shape.num_layers + per_layer if checkpointing else per_layer * shape.num_layers


def logits_bytes(shape: ModelShape, tokens: int, on_gpu: bool) -> int:
    """One chunk of logits in float32; three such exist at once in training, two in inference."""
    return 4 * min(tokens * shape.vocab_size, LOGITS_IN_CHUNK["cuda" if on_gpu else "cpu"])


def forward_memory(shape: ModelShape, dtype: str, tokens: int, base: int, on_gpu: bool) -> Memory:
    """A model that only runs forward: weights, one layer's activations and two chunks of logits."""
    width = BYTES[dtype]
    working = 17 * width * tokens * shape.hidden_size + 2 * logits_bytes(shape, tokens, on_gpu)
    process = () if on_gpu else (("process", base),)
    return Memory((*process, ("weights", shape.num_parameters * width), ("activations", working)), on_gpu)
