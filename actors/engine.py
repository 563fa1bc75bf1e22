"""One vLLM engine: token prompts in, samples with log-probabilities and policy versions out; weights in.

Versions: a token's version is that of the weights that drew it. While an update runs, requests that have
tokens are frozen and go on under the new weights (their old key-value cache is kept); requests without
tokens are sent again, so that nothing drawn under new weights starts from a prefix cached under old ones.
Under LoRA there is no such switch: a request finishes with the adapter that it began with.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from actors import vllm_compat
from actors.engine_spec import EngineSpec
from actors.vllm_plugin import OWNER_VARIABLE
from rl_cluster.errors import DeadlineError, RLClusterError, WeightSyncError, WorkerDiedError
from rl_cluster.modeling.end_tokens import joined_ids
from rl_cluster.trajectory import FinishReason, SamplingSpec, is_truncated
from rl_cluster.weights.channel import Channel
from rl_cluster.weights.wire import TensorMeta


@dataclass(frozen=True)
class Sample:
    """One response of n tokens, stop tokens included.

    tokens, versions: int32 [n]. logprobs: float32 [n], natural log, among all tokens at the temperature used
    (at 1 for temperature 0), whatever top_k and top_p leave; NaN where vLLM does not tell.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason


@dataclass(frozen=True)
class _Switch:
    """An update: the version that follows it, and how many tokens each request had by then."""

    version: int
    num_tokens: dict[str, int]


class Engine:
    """Wraps an AsyncLLM; use `start`. Lives in one running event loop. name: for error messages."""

    def __init__(self, spec: EngineSpec, name: str = "engine") -> None:
        os.environ.update(spec.environment | {OWNER_VARIABLE: str(os.getpid())})
        self.spec = spec
        self.name = name
        self.version = 0
        self._llm = AsyncLLM.from_engine_args(vllm_compat.engine_args(spec))
        self._watch = vllm_compat.OutputWatch(self._llm)
        self._channel: Channel | None = None
        self._publications = 0
        self._switches: list[_Switch] = []
        self._adapter: LoRARequest | None = None
        self._proofs: list[dict[str, Any]] = []
        self._finished_tokens = 0
        self._request_ids = itertools.count()
        self._open = asyncio.Event()
        self._open.set()
        self._unusable: str | None = None
        self._broken_off = False
        self._whole_logprobs = False
        self._active: set[str] = set()

    @classmethod
    async def start(cls, spec: EngineSpec, name: str = "engine") -> Engine:
        """An engine that serves what is on disk as version 0. Blocks the event loop while it loads."""
        engine = cls(spec, name)
        await engine.set_version(0)
        engine._whole_logprobs = all(await engine._llm.collective_rpc("report_whole_logprobs"))
        return engine

    async def set_version(self, version: int) -> None:
        """Declare which version the weights loaded from disk are."""
        self.version = version
        await vllm_compat.label_weights(self._llm, version)

    def check_alive(self) -> None:
        """Raises WorkerDiedError when vLLM's process has ended."""
        if self._llm.errored:
            raise WorkerDiedError(self.name, "vLLM's engine process ended")

    @property
    def running(self) -> int:
        """Requests submitted and not finished."""
        return int(self._llm.get_num_unfinished_requests())

    @property
    def generated_tokens(self) -> int:
        """Since the start, those of running requests included: the sign of progress."""
        return self._finished_tokens + sum(self._watch.num_output_tokens().values())

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Of the model's generation config and of its tokenizer."""
        configured = self._llm.model_config.try_get_generation_config().get("eos_token_id")
        return joined_ids(configured, self.tokenizer.eos_token_id)

    @property
    def tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    async def generate(self, prompt: Sequence[int], seed: int, sampling: SamplingSpec) -> Sample:
        """Draw one response. Raises WeightSyncError when the engine's weights are not to be trusted,
        WorkerDiedError when vLLM's process is gone."""
        params = vllm_compat.sampling_params(sampling, seed, sampling.max_new_tokens)
        while True:
            await self._open.wait()
            self._check_usable()
            request_id = str(next(self._request_ids))
            begun = self.version
            self._active.add(request_id)
            try:
                output = (await self._run(request_id, prompt, params)).outputs[0]
                versions = self._versions(request_id, begun, output)
            finally:
                self._active.discard(request_id)
            if output.finish_reason != "abort":
                break
        self._finished_tokens += len(output.token_ids)
        logprobs = vllm_compat.sampled_logprobs(output)
        if is_truncated(sampling) and not self._whole_logprobs:
            # This vLLM tells only the probability among the tokens that top-k and top-p left.
            logprobs = np.full_like(logprobs, np.nan)
        return Sample(
            tokens=np.asarray(output.token_ids, dtype=np.int32),
            logprobs=logprobs,
            versions=versions,
            finish_reason="length" if output.finish_reason == "length" else "stop",
        )

    async def _run(self, request_id: str, prompt: Sequence[int], params: Any) -> Any:
        try:
            stream = self._llm.generate(
                vllm_compat.prompt_input(prompt, f"publication-{self._publications}"),
                params,
                request_id,
                lora_request=self._adapter,
            )
            async for output in stream:
                last = output
        except EngineDeadError as error:
            raise WorkerDiedError(self.name, f"vLLM's engine process ended: {error}") from error
        return last

    def _versions(self, request_id: str, begun: int, output: Any) -> np.ndarray:
        """int32 [n]: as vLLM says, or, where it does not, from our own count at each switch."""
        if self.spec.lora_rank is not None:
            return np.full(len(output.token_ids), begun, dtype=np.int32)
        reported = vllm_compat.reported_versions(output)
        return (
            self._counted_versions(request_id, begun, len(output.token_ids)) if reported is None else reported
        )

    def _counted_versions(self, request_id: str, begun: int, num_tokens: int) -> np.ndarray:
        versions = np.full(num_tokens, begun, dtype=np.int32)
        for switch in self._switches:
            if request_id in switch.num_tokens:
                versions[switch.num_tokens[request_id] :] = switch.version
        return versions

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise WeightSyncError(
                f"{self.name} serves nothing until a complete weight update: {self._unusable}"
            )

    async def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [P - 1]: log-probabilities of tokens[1:] at temperature 1, never from a cache."""
        prompt = [int(token) for token in tokens]
        output = await self._run(f"probe-{next(self._request_ids)}", prompt, vllm_compat.probe_params())
        return vllm_compat.prompt_logprobs(output, prompt)

    async def join(self, channel: Channel, rank_offset: int) -> None:
        """Take part in a weight channel; blocks until all its members have come."""
        request = WeightTransferInitRequest(init_info=vllm_compat.join_payload(channel, rank_offset))
        await self._before(channel.timeout_seconds, "joining the weight channel",
                           self._llm.init_weight_transfer_engine(request))  # fmt: skip
        self._channel = channel

    async def receive(
        self, version: int, metadata: Sequence[TensorMeta], timeout_seconds: float, in_flight: bool = True
    ) -> float:
        """Take one complete version from the channel (gloo, nccl); returns the seconds it stood still.

        in_flight: freeze running requests rather than waiting for them to end. After an error the engine
        refuses to generate; requests that were frozen stay so until a complete update.
        """
        assert self._channel is not None, "join a channel first"
        payload = vllm_compat.update_payload(self._channel, metadata, version, timeout_seconds)
        begun = await self.begin_update(version, timeout_seconds, in_flight)
        await self.apply_update(payload, timeout_seconds)
        return await self.finish_update(version, timeout_seconds) - begun

    async def begin_update(self, version: int, timeout_seconds: float, in_flight: bool = True) -> float:
        """Stand still; returns the time.monotonic() of it. Nothing is served until finish_update."""
        self._open.clear()
        begun = time.monotonic()
        await self._guarded(timeout_seconds, "pausing", vllm_compat.pause(self._llm, in_flight))
        await self._guarded(timeout_seconds, "draining outputs", self._watch.drained())
        counts = self._watch.num_output_tokens()
        self._switches.append(_Switch(version, {name: n for name, n in counts.items() if n > 0}))
        if unbegun := [name for name, n in counts.items() if n == 0]:
            await self._llm.abort(unbegun)
        self._publications += 1
        self._unusable, self._proofs = f"the update to version {version} is not complete", []
        if self._broken_off:
            tidy = self._llm.collective_rpc("abandon_weight_update")
            await self._guarded(timeout_seconds, "tidying up after a broken update", tidy)
            self._broken_off = False
        await self._guarded(timeout_seconds, "starting the update", self._llm.start_weight_update())
        watch = self._llm.collective_rpc("watch_loading", args=(version,))
        await self._guarded(timeout_seconds, "watching what is loaded", watch)
        return begun

    async def apply_update(self, payload: dict[str, Any], timeout_seconds: float) -> None:
        """Hand one `update_weights` payload to vLLM's workers."""
        update = self._llm.update_weights(WeightTransferUpdateRequest(update_info=payload))
        await self._guarded(timeout_seconds, "receiving weights", update)

    async def apply_chunk(self, chunk: dict[str, Any], timeout_seconds: float) -> None:
        """CUDA IPC: load one chunk of handles."""
        await self.apply_update(vllm_compat.ipc_update(chunk), timeout_seconds)

    async def finish_update(self, version: int, timeout_seconds: float) -> float:
        """Serve the new version from now on; returns the time.monotonic() of it."""
        await self._guarded(timeout_seconds, "finishing the update", self._llm.finish_weight_update())
        proving = self._llm.collective_rpc("proof_of_loading")
        self._proofs = await self._guarded(timeout_seconds, "proving what is served", proving)
        await self._guarded(timeout_seconds, "naming the version", self.set_version(version))
        await self._guarded(timeout_seconds, "resuming", self._llm.resume_generation())
        self._unusable = None
        self._forget_old_switches()
        self._open.set()
        return time.monotonic()

    async def loaded(self) -> list[dict[str, Any]]:
        """One proof per worker process of what it serves: version, digests by name, stale (what differs)."""
        if self._adapter is None:
            return self._proofs
        known = self._adapter.lora_int_id in await self._llm.list_loras()
        return [vllm_compat.adapter_proof(self._adapter, self.version, known)]

    def _forget_old_switches(self) -> None:
        self._switches = [s for s in self._switches if not self._active.isdisjoint(s.num_tokens)]

    async def _guarded(self, timeout_seconds: float, doing: str, awaitable: Awaitable[Any]) -> Any:
        """As _before; a failure leaves the engine standing still and unusable until a complete update."""
        try:
            return await self._before(timeout_seconds, doing, awaitable)
        except Exception as error:
            self._unusable, self._broken_off = f"{doing} failed: {error}", True
            self._open.set()
            if isinstance(error, RLClusterError):
                raise
            raise WeightSyncError(f"{self.name}: {self._unusable}") from error

    async def _before(self, timeout_seconds: float, doing: str, awaitable: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(awaitable, timeout_seconds)
        except TimeoutError as error:
            raise DeadlineError(f"{self.name}: {doing} took longer than {timeout_seconds:g} s") from error
        except EngineDeadError as error:
            raise WorkerDiedError(self.name, f"vLLM's engine process ended while {doing}") from error

    async def set_adapter(self, version: int, folder: str, timeout_seconds: float) -> None:
        """Serve a peft adapter from now on; what runs finishes with the one before."""
        adapter = vllm_compat.lora_request(f"version-{version}", self._publications + 1, folder)
        await self._before(timeout_seconds, "loading the adapter", self._llm.add_lora(adapter))
        self._publications += 1
        self._adapter, self.version = adapter, version

    async def sleep(self) -> None:
        """Give the GPU's memory back (weights are kept in host memory; the cache is dropped)."""
        self._open.clear()
        await self._llm.sleep(level=1, mode="wait")

    async def wake(self) -> None:
        await self._llm.wake_up()
        self._open.set()

    def shutdown(self) -> None:
        """Ends vLLM's processes."""
        self._llm.shutdown()
