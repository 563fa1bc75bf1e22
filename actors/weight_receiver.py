"""The receiving half of the gloo weight transfer, inside vLLM's worker: buckets in, loaded weights out.

A WeightTransferEngine of vLLM's framework beside its own NCCL and IPC ones. The sending half is
learners/transfer_gloo.py; the wire format is rl_cluster/weights/wire.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rl_cluster.weights.channel import Channel, broadcast, connect_store, gloo_group
from rl_cluster.weights.wire import TensorMeta, plan_buckets, verify


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """channel: the fields of a Channel. rank_offset: channel rank of this engine's first worker."""

    channel: dict[str, Any]
    rank_offset: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Everything of one version. The three lists have one entry per tensor, in sending order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    version: int
    timeout_seconds: float


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._channel: Channel | None = None
        self._group: Any = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the channel; blocks until all members are there or its timeout has passed."""
        self._channel = Channel(**init_info.channel)
        self._group = None
        rank = init_info.rank_offset + self.parallel_config.rank
        self._group = gloo_group(connect_store(self._channel), self._channel, rank)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive, verify and load bucket by bucket. Raises WeightSyncError on a wrong checksum and
        RuntimeError (gloo's) on a lost connection or timeout; the channel must then be joined anew.

        vLLM keeps views of a bucket until the layers in it are complete, so buckets are not reused.
        """
        assert self._group is not None, "join the channel first"
        assert self._channel is not None
        deadline = time.monotonic() + update_info.timeout_seconds
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        metadata = [TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in described]
        group, self._group = self._group, None
        for bucket in plan_buckets(metadata, self._channel.packed_bytes):
            buffer = bucket.empty()
            remaining = max(deadline - time.monotonic(), 0.001)
            broadcast(group, buffer).wait(timedelta(seconds=remaining))
            verify(bucket, buffer, update_info.version)
            self.model.load_weights((name, t.to(self.device)) for name, t in bucket.views(buffer))
        self._group = group

    def shutdown(self) -> None:
        self._group = None
