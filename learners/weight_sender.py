"""Publishing from the learner's side: functions for LearnerGroup.apply, and the driver's LearnerSender.

Each `..._on` function runs on every rank, in lockstep, because the weights are gathered collectively; rank 0
alone talks to the receivers. What a rank keeps between calls (its channel) is a RankSender.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from learners.group import LearnerGroup
from learners.micro_batch import MicroBatch
from learners.rank import LearnerRank
from learners.transfer_gloo import GlooSender
from rl_cluster.batch import TokenBatch
from rl_cluster.errors import WeightSyncError
from rl_cluster.weights.channel import Channel
from rl_cluster.weights.digest import digest
from rl_cluster.weights.wire import TensorMeta

_senders: WeakKeyDictionary[LearnerRank, Any] = WeakKeyDictionary()
"""The sending end that a rank of this process holds; dropped with the rank."""
_digests: WeakKeyDictionary[LearnerRank, dict[str, int]] = WeakKeyDictionary()
"""Rank 0: name -> digest of what the last publication sent."""


def metadata_on(rank: LearnerRank) -> list[TensorMeta]:
    """What will be sent, in order."""
    return [
        TensorMeta(meta.name, str(meta.dtype).removeprefix("torch."), tuple(meta.shape))
        for meta in rank.weight_metadata()
    ]


def rendezvous_on(rank: LearnerRank, backend: str) -> tuple[str, int, int] | None:
    """Host, port and generation of a new rendezvous with rank 0; None on the other ranks."""
    if rank.rank != 0:
        return None
    if rank not in _senders:
        _senders[rank] = _SENDERS[backend]()
    return own_ip(), *_senders[rank].rendezvous()


def open_on(rank: LearnerRank, channel: Channel) -> None:
    """Rank 0 waits for the receivers of `channel`; the others do nothing."""
    if rank.rank == 0:
        _senders[rank].open(channel)


def send_on(rank: LearnerRank, version: int, seconds: float) -> int:
    """Gather everywhere, send from rank 0; bytes sent. Raises WeightSyncError or DeadlineError on rank 0."""
    groups = _noted(rank, rank.weight_groups())
    if rank.rank == 0:
        return int(_senders[rank].send(metadata_on(rank), groups, version, time.monotonic() + seconds))
    for _ in groups:
        pass
    return 0


def next_chunk_on(rank: LearnerRank, bucket_bytes: int) -> dict[str, Any] | None:
    """CUDA IPC: this rank's handles of the next chunk, None after the last."""
    from learners.transfer_vllm import IpcSender

    sender = _senders.get(rank)
    if sender is None:
        largest = max(meta.num_bytes for meta in metadata_on(rank))
        sender = _senders[rank] = IpcSender(max(bucket_bytes, largest))
    return sender.next_chunk(_noted(rank, rank.weight_groups()))


def adapter_on(rank: LearnerRank) -> AdapterFiles | None:
    """LoRA: the adapter as the files of a peft folder, from rank 0."""
    groups = _noted(rank, rank.weight_groups())
    tensors = {name: t.detach().cpu().clone() for group in groups for name, t in group}
    if rank.rank != 0:
        return None
    from safetensors.torch import save

    lora = rank.spec.lora
    if lora is None:
        raise WeightSyncError("the learner has no adapter to publish")
    return AdapterFiles(config=_peft_config(rank), tensors=save(tensors))


def _noted(rank: LearnerRank, groups: Iterator[list[tuple[str, torch.Tensor]]]) -> Iterator[Any]:
    """The groups as they come; rank 0 keeps the digests of what passes: its own weights."""
    digests: dict[str, int] = {}
    if rank.rank == 0:
        _digests[rank] = digests
    for group in groups:
        if rank.rank == 0:
            digests.update({name: digest(tensor) for name, tensor in group})
        yield group


def digests_on(rank: LearnerRank) -> dict[str, int]:
    """Of the last publication, by name; {} except on rank 0."""
    return _digests.get(rank, {})


def probe_on(rank: LearnerRank, *sequences: np.ndarray) -> np.ndarray:
    """float32 [Σ (P - 1)]: the learner's log-probabilities of tokens[1:] of each, at temperature 1, in one
    packed pass."""
    lengths = np.array([len(tokens) for tokens in sequences], dtype=np.int32)
    mask = np.ones(int(lengths.sum()), dtype=np.bool_)
    mask[np.cumsum(lengths) - lengths] = False
    batch = TokenBatch(
        tokens=np.concatenate(sequences).astype(np.int32),
        lengths=lengths,
        action_mask=mask,
        units=np.arange(len(sequences), dtype=np.int32),
        group_ids=np.arange(len(sequences), dtype=np.int32),
    )
    micro = MicroBatch.of(batch, range(len(sequences)), rank.device)
    rank.model.eval()
    with torch.no_grad():
        logprobs = rank.engine.forward(micro.tokens, micro.packed, micro.targets, 1.0)[0]
    values: np.ndarray = logprobs.float().cpu().numpy()
    return values


@dataclass(frozen=True)
class AdapterFiles:
    """adapter_config.json and adapter_model.safetensors of a peft folder."""

    config: str
    tensors: bytes


def _peft_config(rank: LearnerRank) -> str:
    import json

    lm: Any = rank.model.lm
    config = lm.peft_config[lm.active_adapter].to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return json.dumps(plain | {"inference_mode": True}, default=str)


def own_ip() -> str:
    """This node's address as Ray knows it, or loopback without Ray."""
    import ray

    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"


def _nccl() -> Any:
    from learners.transfer_vllm import NcclSender

    return NcclSender()


_SENDERS: dict[str, Any] = {"gloo": GlooSender, "nccl": _nccl}


class LearnerSender:
    """The learner as the publisher sees it (rl_cluster.loop.publisher.WeightSender)."""

    def __init__(self, group: LearnerGroup, backend: str) -> None:
        self._group = group
        self._backend = backend

    async def metadata(self) -> list[TensorMeta]:
        result: list[TensorMeta] = (await self._group.apply(metadata_on))[0]
        return result

    async def rendezvous(self) -> tuple[str, int, int]:
        result: tuple[str, int, int] = (await self._group.apply(rendezvous_on, self._backend))[0]
        return result

    async def open(self, channel: Channel) -> None:
        await self._group.apply(open_on, channel, deadline_seconds=channel.timeout_seconds + 10)

    async def send(self, version: int, seconds: float) -> int:
        result: int = (await self._group.apply(send_on, version, seconds, deadline_seconds=seconds + 10))[0]
        return result

    async def next_chunk(self, bucket_bytes: int) -> dict[str, Any] | None:
        """The handles of all ranks merged."""
        chunks = await self._group.apply(next_chunk_on, bucket_bytes)
        if chunks[0] is None:
            return None
        handles = {uuid: args for chunk in chunks for uuid, args in chunk["ipc_handles"].items()}
        result: dict[str, Any] | None = chunks[0] | {"ipc_handles": handles}
        return result

    async def adapter(self) -> AdapterFiles:
        result: AdapterFiles = (await self._group.apply(adapter_on))[0]
        return result

    async def digests(self) -> dict[str, int]:
        result: dict[str, int] = (await self._group.apply(digests_on))[0]
        return result

    async def probe(self, *sequences: np.ndarray) -> np.ndarray:
        values: np.ndarray = (await self._group.apply(probe_on, *sequences))[0]
        return values
