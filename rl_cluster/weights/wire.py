"""The wire format of published weights: tensor metadata in, the same bucket layout out on both sides.

A bucket is one flat uint8 buffer: tensors in metadata order, each at a multiple of 64 bytes, then a
trailer of three int64 (checksum, policy version, bucket index). Sender and receivers derive the layout
from the metadata, so nothing but the buckets travels. Buckets are the only large memory on either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rl_cluster.errors import WeightSyncError

ALIGNMENT = 64
BLOCK_BYTES = 8192
TRAILER_BYTES = 24

NamedTensors = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorMeta:
    """One published tensor. name: Hugging Face name. dtype: as in `torch.<dtype>`, on the wire."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(getattr(torch, self.dtype).itemsize * torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its bucket; offset in bytes."""

    meta: TensorMeta
    offset: int


@dataclass(frozen=True)
class Bucket:
    """num_bytes: of the whole buffer, padding and trailer included."""

    index: int
    slots: tuple[Slot, ...]
    num_bytes: int

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """uint8 [num_bytes], contents undefined except for the padding, which is 0."""
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        ends = [slot.offset + slot.meta.num_bytes for slot in self.slots]
        starts = [slot.offset for slot in self.slots[1:]] + [self.num_bytes]
        for end, start in zip(ends, starts, strict=True):
            buffer[end:start].zero_()
        return buffer

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The named tensors, as views into the buffer."""
        return [(slot.meta.name, _view(buffer, slot)) for slot in self.slots]


def _view(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    piece = buffer[slot.offset : slot.offset + slot.meta.num_bytes]
    return piece.view(getattr(torch, slot.meta.dtype)).view(slot.meta.shape)


def plan_buckets(metadata: Sequence[TensorMeta], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Tensors in order, as many per bucket as fit into bucket_bytes; a larger tensor has one to itself."""
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for meta in metadata:
        if slots and end + meta.num_bytes > bucket_bytes:
            buckets.append(_bucket(len(buckets), slots, end))
            slots, end = [], 0
        slots.append(Slot(meta, end))
        end = _round_up(end + meta.num_bytes, ALIGNMENT)
    if slots:
        buckets.append(_bucket(len(buckets), slots, end))
    return tuple(buckets)


def _bucket(index: int, slots: list[Slot], end: int) -> Bucket:
    return Bucket(index, tuple(slots), _round_up(end, BLOCK_BYTES) + TRAILER_BYTES)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def fill_buckets(
    buckets: Sequence[Bucket], groups: Iterable[NamedTensors], version: int
) -> Iterator[torch.Tensor]:
    """Sealed buffers in bucket order, copied from the groups' tensors on the tensors' device.

    Raises WeightSyncError when the groups do not yield exactly the planned tensors.
    """
    remaining = iter(buckets)
    bucket: Bucket | None = None
    buffer = torch.empty(0)
    position = 0
    for group in groups:
        for name, tensor in group:
            if bucket is None:
                bucket, position = next(remaining, None), 0
                if bucket is None:
                    raise WeightSyncError(
                        f"the learner yielded {name!r} after the last tensor of its metadata"
                    )
                buffer = bucket.empty(tensor.device)
            slot = bucket.slots[position]
            if (name, tuple(tensor.shape)) != (slot.meta.name, slot.meta.shape):
                raise WeightSyncError(
                    f"the learner yielded {name!r} {tuple(tensor.shape)} where its metadata has"
                    f" {slot.meta.name!r} {slot.meta.shape}"
                )
            _view(buffer, slot).copy_(tensor.detach())
            position += 1
            if position == len(bucket.slots):
                yield seal(bucket, buffer, version)
                bucket = None
    if bucket is not None or next(remaining, None) is not None:
        raise WeightSyncError("the learner yielded fewer tensors than its metadata has")


def checksum(body: torch.Tensor) -> torch.Tensor:
    """int64 scalar over a uint8 body whose length is a multiple of BLOCK_BYTES, in wrapping arithmetic:
    the sum over 8 KiB blocks of (block number + 1) times the sum of the block's 64-bit words.

    One pass at memory speed on CPU and GPU; it notices changed bytes and swapped or missing blocks.
    """
    blocks = body.view(torch.int64).view(-1, BLOCK_BYTES // 8).sum(dim=1)
    return (blocks * torch.arange(1, len(blocks) + 1, device=body.device)).sum()


def seal(bucket: Bucket, buffer: torch.Tensor, version: int) -> torch.Tensor:
    """Write the trailer; returns the buffer."""
    body = buffer[: bucket.num_bytes - TRAILER_BYTES]
    trailer = torch.tensor([0, version, bucket.index], dtype=torch.int64, device=buffer.device)
    trailer[0] = checksum(body)
    buffer[bucket.num_bytes - TRAILER_BYTES :].copy_(trailer.view(torch.uint8))
    return buffer


def verify(bucket: Bucket, buffer: torch.Tensor, version: int) -> None:
    """Raises WeightSyncError when the buffer is not the sealed bucket of that version."""
    trailer = buffer[bucket.num_bytes - TRAILER_BYTES :].clone().view(torch.int64)
    found = int(checksum(buffer[: bucket.num_bytes - TRAILER_BYTES]))
    expected, sent_version, index = (int(x) for x in trailer)
    if (found, version, bucket.index) != (expected, sent_version, index):
        raise WeightSyncError(
            f"weight bucket {bucket.index} of version {version} arrived damaged: checksum {found:#x}"
            f" instead of {expected:#x}, marked as bucket {index} of version {sent_version}"
        )
