"""How a weight sender and its receivers find each other: a Channel in, a gloo process group out.

Used by the sending half (learners/) and the receiving half (actors/), which must not import each other.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Channel:
    """One rendezvous of a sender (rank 0) and world_size - 1 receiving processes.

    host, port: the sender's TCP store. generation: counts the rendezvous of that store; a new membership
    or a failure needs a new one. packed_bytes: size of the buffers on the wire.
    timeout_seconds: of every single operation on the channel.
    """

    backend: str
    host: str
    port: int
    generation: int
    world_size: int
    packed_bytes: int
    timeout_seconds: float


def own_address(host: str, port: int) -> str:
    """The address of the interface that reaches host (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def connect_store(channel: Channel) -> dist.TCPStore:
    """A client of the sender's store. Raises torch's DistNetworkError when it does not answer in time."""
    timeout = timedelta(seconds=channel.timeout_seconds)
    return dist.TCPStore(channel.host, channel.port, is_master=False, timeout=timeout, wait_for_workers=False)


def gloo_group(store: dist.Store, channel: Channel, rank: int) -> Any:
    """A process group of its own, beside the default one; blocks until all ranks are there, or raises."""
    timeout = timedelta(seconds=channel.timeout_seconds)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    address = own_address(channel.host, channel.port)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    named = dist.PrefixStore(f"weights/{channel.generation}", store)
    named.set_timeout(timeout)
    return dist.ProcessGroupGloo(named, rank, channel.world_size, options)


def broadcast(group: Any, tensor: Any) -> Any:
    """Start a broadcast from rank 0; returns a Work to wait for."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)
