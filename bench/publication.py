"""What a publication's proof costs: one over gloo between two processes, with and without it; beside a bare
broadcast and a memcpy of the same bytes.

`python -m bench.publication [--megabytes 512]`. The receiver copies tensors into places of its own, where an
engine would load them: without the engine's own loading, and without reading packed layers back by columns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch

from learners.transfer_gloo import GlooSender
from rl_cluster.weights.channel import Channel, broadcast, connect_store, gloo_group
from rl_cluster.weights.digest import digest, sum_of_values
from rl_cluster.weights.wire import TensorMeta, plan_buckets, verify

SIDE, TIMES, PACKED_BYTES = 2048, 5, 64 * 2**20


def _metadata(count: int) -> list[TensorMeta]:
    return [TensorMeta(f"layer.{i}", "bfloat16", (SIDE, SIDE)) for i in range(count)]


def _receive(channel: Channel, count: int, total: int) -> None:
    """Publications in turn without and with proof, then bare broadcasts."""
    torch.set_num_threads(1)
    group = gloo_group(connect_store(channel), channel, 1)
    served = {meta.name: torch.empty(meta.shape, dtype=torch.bfloat16) for meta in _metadata(count)}
    buckets = plan_buckets(_metadata(count), channel.packed_bytes)
    done = torch.zeros(1)
    for number in range(2 * TIMES):
        proof = 0
        for bucket in buckets:
            buffer = bucket.empty()
            broadcast(group, buffer).wait()
            verify(bucket, buffer, number)
            for name, tensor in bucket.views(buffer):
                if number % 2:
                    proof ^= digest(tensor) ^ sum_of_values(tensor)
                served[name].copy_(tensor)
        if number % 2:
            proof ^= sum(sum_of_values(tensor) for tensor in served.values())
        _answer(group, done).wait()
    for _ in range(TIMES):
        broadcast(group, torch.empty(total, dtype=torch.uint8)).wait()
        _answer(group, done).wait()


def _answer(group: Any, tensor: torch.Tensor) -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 0
    return group.broadcast([tensor], options)


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=512)
    count = parser.parse_args().megabytes * 2**20 // (2 * SIDE * SIDE)
    torch.set_num_threads(1)
    weights = [(meta.name, torch.randn(meta.shape).bfloat16()) for meta in _metadata(count)]
    total = sum(tensor.nbytes for _, tensor in weights)
    sender, channel = GlooSender(), None
    channel = Channel("gloo", "127.0.0.1", *sender.rendezvous(), 2, PACKED_BYTES, 120.0)
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(channel, count, total))
    process.start()
    sender.open(channel)
    done = torch.zeros(1)

    def publish(number: int) -> None:
        if number % 2:
            for _, tensor in weights:
                digest(tensor)
        sender.send(_metadata(count), iter([weights]), number, time.monotonic() + 120)
        _answer(sender._group, done).wait()

    times = [_timed(lambda number=number: publish(number)) for number in range(2 * TIMES)]
    flat = torch.zeros(total, dtype=torch.uint8)

    def bare() -> None:
        broadcast(sender._group, flat).wait()
        _answer(sender._group, done).wait()

    rows = {
        "memcpy": _median([_timed(flat.clone) for _ in range(TIMES)]),
        "bare broadcast over gloo": _median([_timed(bare) for _ in range(TIMES)]),
        "publication without proof": _median(times[::2]),
        "publication with proof": _median(times[1::2]),
    }
    process.join()
    print(f"{total / 2**20:.0f} MiB of bfloat16, {count} tensors, one thread each, median of {TIMES}")
    for name, seconds in rows.items():
        print(f"{name:28s} {seconds:.3f} s  {total / seconds / 2**30:.2f} GiB/s")
    share = 1 - rows["publication without proof"] / rows["publication with proof"]
    print(f"the proof's share of a publication: {share:.0%}")


if __name__ == "__main__":
    main()
