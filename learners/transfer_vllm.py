"""The sending halves for GPUs, by vLLM's own weight transfer: NCCL packed broadcast and CUDA IPC handles.

Enters: layer groups of full tensors. Leaves: NCCL broadcasts that vLLM's NCCLWeightTransferEngine receives,
or chunks of IPC handles for its IPCWeightTransferEngine. The one place in learners/ that imports vLLM; the
functions used are the same in vLLM 0.26 and 0.32.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer, packed_nccl_broadcast_producer

from rl_cluster.errors import DeadlineError, WeightSyncError
from rl_cluster.weights.channel import Channel
from rl_cluster.weights.wire import NamedTensors, TensorMeta


class NcclSender:
    """Rank 0 of the channel. NCCL cannot time out: calls run on a thread of their own that is given up at
    the deadline, and the learner rank must then be restarted."""

    def __init__(self) -> None:
        self._generation = 0
        self._group: Any = None
        self._channel: Channel | None = None

    def rendezvous(self) -> tuple[int, int]:
        """A free port of this node, and the count of rendezvous so far."""
        self._generation += 1
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1], self._generation

    def open(self, channel: Channel) -> None:
        """Blocks until all receivers have joined. Raises DeadlineError."""
        address = {
            "master_address": channel.host,
            "master_port": channel.port,
            "world_size": channel.world_size,
        }
        deadline = time.monotonic() + channel.timeout_seconds
        self._group = run_before(deadline, "opening the NCCL weight channel", trainer_init, address)
        self._channel = channel

    def send(
        self, metadata: Sequence[TensorMeta], groups: Iterable[NamedTensors], version: int, deadline: float
    ) -> int:
        """Broadcast all tensors; returns their bytes. deadline: a time.monotonic() value."""
        if self._group is None or self._channel is None:
            raise WeightSyncError("the weight channel is not open")
        group, self._group = self._group, None
        run_before(deadline, f"sending the weights of version {version}", self._broadcast, group, groups)
        self._group = group
        return sum(meta.num_bytes for meta in metadata)

    def _broadcast(self, group: Any, groups: Iterable[NamedTensors]) -> None:
        assert self._channel is not None
        tensors = copied(groups)
        try:
            packed_nccl_broadcast_producer(
                iterator=tensors,
                group=group,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=self._channel.packed_bytes,
            )
        finally:
            for _ in tensors:
                pass

    def close(self) -> None:
        self._group = None


class IpcSender:
    """Makes chunks of handles on this rank's GPU; every rank has one. A chunk must have been loaded by the
    engine before the next is asked for: all chunks of a publication share one buffer."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._chunks: Iterator[Any] | None = None

    def next_chunk(self, groups: Iterable[NamedTensors]) -> dict[str, Any] | None:
        """The next chunk as a payload for the engine, None after the last.

        `groups` is used by the first call of a publication. handles: {GPU uuid: arguments of
        rebuild_cuda_tensor}; the driver merges those of all ranks.
        """
        if self._chunks is None:
            device = torch.cuda.current_device()
            self._chunks = packed_ipc_producer(
                iterator=copied(groups),
                gpu_uuid=str(torch.cuda.get_device_properties(device).uuid),
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=self._buffer_bytes,
            )
        chunk = next(self._chunks, None)
        if chunk is None:
            self._chunks = None
            torch.cuda.ipc_collect()
            return None
        payload = asdict(chunk)
        payload["ipc_handles"] = payload.pop("ipc_handle")
        return payload


def copied(groups: Iterable[NamedTensors]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that stay valid on any stream after their group has been partitioned again."""
    for group in groups:
        clones = [(name, tensor.detach().clone()) for name, tensor in group]
        torch.cuda.current_stream().synchronize()
        yield from clones


def run_before(deadline: float, doing: str, function: Any, *args: Any) -> Any:
    """function(*args) on a thread of its own. Raises what it raises, DeadlineError when it is late."""
    outcome: list[Any] = []
    device = torch.cuda.current_device()

    def work() -> None:
        torch.cuda.set_device(device)
        try:
            outcome.append((function(*args), None))
        except Exception as error:  # noqa: BLE001 — raised again by the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=work, name=doing, daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0.001))
    if not outcome:
        raise DeadlineError(f"{doing} did not end before its deadline; the learner rank must be restarted")
    result, error = outcome[0]
    if error is not None:
        raise WeightSyncError(f"{doing} failed: {error}") from error
    return result
