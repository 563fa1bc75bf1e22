"""The sending half of the gloo weight transfer: layer groups of full tensors in, sealed buckets out.

The receiving half is actors/weight_receiver.py. Gathering and sending overlap: while one bucket is on the
wire the next is filled, so at most two buckets exist beside the learner's own weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl_cluster.errors import DeadlineError, WeightSyncError
from rl_cluster.weights.channel import Channel, broadcast, gloo_group
from rl_cluster.weights.wire import NamedTensors, TensorMeta, fill_buckets, plan_buckets


class GlooSender:
    """Rank 0 of the channel. Not thread-safe; the wire work itself runs on gloo's threads."""

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._channel: Channel | None = None
        self._generation = 0

    def rendezvous(self) -> tuple[int, int]:
        """Port and generation of a new rendezvous. The store behind the port is opened once, then kept."""
        if self._store is None:
            self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self._generation += 1
        return self._store.port, self._generation

    def open(self, channel: Channel) -> None:
        """Blocks until every receiver has joined; raises DeadlineError after channel.timeout_seconds."""
        assert self._store is not None, "rendezvous first"
        self._group, self._channel = None, channel
        try:
            self._group = gloo_group(self._store, channel, rank=0)
        except RuntimeError as error:
            raise DeadlineError(
                f"not all of the {channel.world_size - 1} weight receivers joined within"
                f" {channel.timeout_seconds:g} s: {error}"
            ) from error

    def send(
        self, metadata: Sequence[TensorMeta], groups: Iterable[NamedTensors], version: int, deadline: float
    ) -> int:
        """Broadcast all buckets; returns the bytes sent.

        `groups` is always consumed to its end, even after a failure: it gathers together with other ranks.
        deadline: a time.monotonic() value. Raises WeightSyncError; the channel must then be opened anew.
        """
        if self._group is None or self._channel is None:
            raise WeightSyncError("the weight channel is not open")
        gathered = iter(groups)
        buckets = plan_buckets(metadata, self._channel.packed_bytes)
        try:
            self._send_all(fill_buckets(buckets, gathered, version), deadline)
        except (RuntimeError, WeightSyncError) as error:
            self._group = None
            raise WeightSyncError(f"sending the weights of version {version} failed: {error}") from error
        finally:
            for _ in gathered:
                pass
        return sum(bucket.num_bytes for bucket in buckets)

    def _send_all(self, buffers: Iterator[torch.Tensor], deadline: float) -> None:
        pending: list[tuple[Any, torch.Tensor]] = []
        for buffer in buffers:
            while len(pending) > 1:
                _wait(pending.pop(0)[0], deadline)
            on_cpu = buffer.cpu()
            pending.append((broadcast(self._group, on_cpu), on_cpu))
        for work, _ in pending:
            _wait(work, deadline)

    def close(self) -> None:
        """Drop the group and the store."""
        self._group = self._store = None


def _wait(work: Any, deadline: float) -> None:
    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
