"""Everything that touches vLLM's internals or differs between vLLM 0.26 and 0.32, in one place.

Enters: EngineSpec, tokens, channels. Leaves: vLLM's own objects, and counts read from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from actors.engine_spec import EngineSpec
from rl_cluster.errors import NonFiniteError
from rl_cluster.trajectory import SamplingSpec
from rl_cluster.weights.channel import Channel
from rl_cluster.weights.digest import digest
from rl_cluster.weights.wire import TensorMeta

REPORTS_VERSIONS = "weight_versions" in {f.name for f in fields(CompletionOutput)}
"""vLLM 0.32 labels output tokens with the weight version that drew them; 0.26 does not."""

UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By its path, because vLLM turns "uni" into "mp" on CPUs: a process more per engine, and an engine core
that spins on a whole core while it waits for it. Threads are bound by the environment instead."""


def engine_args(spec: EngineSpec) -> AsyncEngineArgs:
    options: dict[str, Any] = {}
    if spec.device == "cpu":
        options["kv_cache_memory_bytes"] = int(spec.kv_cache_gib * 2**30)
        # A prompt cut over two steps, of a request with a seed, kills vLLM 0.32's engine core on CPUs
        # ("CPU Generator does not use offset").
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(spec.max_model_len, spec.max_num_seqs, 4096)
        if spec.tensor_parallel_size == 1:
            options["distributed_executor_backend"] = UNIPROC
    else:
        options["gpu_memory_utilization"] = spec.gpu_memory_fraction
        options["enable_sleep_mode"] = spec.sleep_mode
    if spec.lora_rank is not None:
        options |= {"enable_lora": True, "max_lora_rank": max(spec.lora_rank, 8), "max_loras": 2}
    return AsyncEngineArgs(
        model=spec.model,
        dtype=spec.dtype,
        seed=spec.seed,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        tensor_parallel_size=spec.tensor_parallel_size,
        enforce_eager=spec.eager,
        trust_remote_code=spec.trust_remote_code,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        weight_transfer_config={"backend": spec.sync_backend},
        worker_extension_cls="actors.vllm_plugin.WorkerExtension",
        **options,
    )


def sampling_params(sampling: SamplingSpec, seed: int, max_tokens: int) -> SamplingParams:
    """One sample; its text is needed by vLLM only to find stop strings."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k if sampling.top_k > 0 else 0,
        max_tokens=max_tokens,
        seed=seed % 2**63,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos,
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def probe_params() -> SamplingParams:
    """Log-probabilities of the prompt itself, at temperature 1."""
    return SamplingParams(
        temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def prompt_input(tokens: Sequence[int], cache_salt: str) -> Any:
    """Already rendered, so vLLM neither tokenises nor hands it to its thread pool."""
    return tokens_input(list(tokens), cache_salt=cache_salt)


def lora_request(name: str, adapter_id: int, folder: str) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=adapter_id, lora_path=folder)


def adapter_proof(adapter: LoRARequest, version: int, known: bool) -> dict[str, Any]:
    """As ServedWeights.proof, of the tensors in the folder that the engine serves the adapter from. known:
    the engine has loaded it."""
    from pathlib import Path

    from safetensors.torch import load_file

    tensors = load_file(Path(adapter.lora_path) / "adapter_model.safetensors")
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    return {"version": version, "digests": digests, "stale": [] if known else ["the adapter"]}


def sampled_logprobs(output: CompletionOutput) -> np.ndarray:
    """float32 [n]: of the drawn tokens, natural log, after temperature."""
    flat: Any = output.logprobs
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)
    assert len(logprobs) == len(output.token_ids)
    if not np.isfinite(logprobs).all():
        raise NonFiniteError(
            f"sampling: {int((~np.isfinite(logprobs)).sum())} of {len(logprobs)} log-probabilities of a "
            "response are not finite; the weights in the engine are spoilt. Go on from a checkpoint before, "
            "with a lower optimizer.learning_rate."
        )
    return logprobs


def prompt_logprobs(output: Any, tokens: Sequence[int]) -> np.ndarray:
    """float32 [P - 1]: of tokens[1:], each given the tokens before it."""
    positions = output.prompt_logprobs[1:]
    pairs = zip(positions, tokens[1:], strict=True)
    return np.array([position[token].logprob for position, token in pairs], dtype=np.float32)


class OutputWatch:
    """Knows when everything that the engine core has produced has been booked on its requests.

    Replaces the client's `get_output_async` by one that notes when vLLM's output loop, done with all
    there was, waits for more. (vLLM itself sleeps 20 ms after a pause and hopes.)
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._core: Any = llm.engine_core
        self._idle = asyncio.Event()
        self._original = self._core.get_output_async
        self._core.get_output_async = self._get_output

    async def _get_output(self) -> Any:
        if self._core.outputs_queue.empty():
            self._idle.set()
        try:
            return await self._original()
        finally:
            self._idle.clear()

    async def drained(self) -> None:
        """Wait for that moment; only ever comes while the engine is paused or has nothing to do."""
        while self._llm.output_processor.request_states:
            await self._idle.wait()
            if self._core.outputs_queue.empty():
                return
            await asyncio.sleep(0)

    def num_output_tokens(self) -> dict[str, int]:
        """Tokens so far of every request that has not finished, by the id that we gave it."""
        states = self._llm.output_processor.request_states.values()
        return {s.external_req_id: s.detokenizer.num_output_tokens() for s in states if s.detokenizer}


async def pause(llm: AsyncLLM, in_flight: bool) -> None:
    """Stop scheduling: running requests are frozen (in_flight) or waited for. Caches are kept; the
    client's own method would add a sleep, for which OutputWatch.drained is the exact replacement."""
    mode = "keep" if in_flight else "wait"
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)


def reported_versions(output: CompletionOutput) -> np.ndarray | None:
    """int32 [n] as vLLM tells it, None before 0.32."""
    spans = getattr(output, "weight_versions", None)
    if spans is None:
        return None
    parts = [np.full(s.end - s.start, int(s.version), dtype=np.int32) for s in spans]
    values: np.ndarray | None = np.concatenate([np.zeros(0, dtype=np.int32), *parts])
    return values


async def label_weights(llm: AsyncLLM, version: int) -> None:
    """Tokens drawn from now on are of `version`."""
    if REPORTS_VERSIONS:
        await llm.update_weight_version(str(version))


def join_payload(channel: Channel, rank_offset: int) -> dict[str, Any]:
    """What `init_weight_transfer_engine` takes, by backend."""
    return _JOIN[channel.backend](channel, rank_offset)


def update_payload(
    channel: Channel, metadata: Sequence[TensorMeta], version: int, timeout_seconds: float
) -> dict[str, Any]:
    """What `update_weights` takes, by backend (IPC: see the chunks that the sender makes)."""
    described: dict[str, Any] = {
        "names": [m.name for m in metadata],
        "dtype_names": [m.dtype for m in metadata],
        "shapes": [list(m.shape) for m in metadata],
    }
    return described | _UPDATE[channel.backend](channel, version, timeout_seconds)


def _packing(channel: Channel) -> dict[str, Any]:
    return {"packed": True, "packed_buffer_size_bytes": channel.packed_bytes}


def _gloo_join(channel: Channel, rank_offset: int) -> dict[str, Any]:
    return {"channel": asdict(channel), "rank_offset": rank_offset}


def _nccl_join(channel: Channel, rank_offset: int) -> dict[str, Any]:
    payload = {
        "master_address": channel.host,
        "master_port": channel.port,
        "rank_offset": rank_offset,
        "world_size": channel.world_size,
    }
    return payload | (_packing(channel) if _packing_at_join() else {})


def _ipc_join(channel: Channel, rank_offset: int) -> dict[str, Any]:
    return {"packed": True} if _packing_at_join() else {}


def _packing_at_join() -> bool:
    """vLLM 0.32 agrees on the packing at the rendezvous, 0.26 says it with each update."""
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    return "packed" in {f.name for f in fields(NCCLWeightTransferInitInfo)}


def _nccl_update(channel: Channel, version: int, timeout_seconds: float) -> dict[str, Any]:
    return {} if _packing_at_join() else _packing(channel)


def ipc_update(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk of learners/transfer_vllm.py as this vLLM's `update_weights` takes it."""
    return chunk if _packing_at_join() else chunk | {"packed": True}


_JOIN = {"gloo": _gloo_join, "nccl": _nccl_join, "ipc": _ipc_join}
_UPDATE = {
    "gloo": lambda channel, version, seconds: {"version": version, "timeout_seconds": seconds},
    "nccl": _nccl_update,
}
