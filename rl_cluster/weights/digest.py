"""Numbers that tell tensors apart: a digest of bytes in their places, and a sum that forgets the places.

Sender and receivers compare digests by name: which tensors reached the engine's loader. Engines compare the
sums with those of what they serve, because loading fuses, transposes and shards, but keeps every number.
"""

from __future__ import annotations

import torch

_WORDS = 1024
"""64-bit words of a block."""
_CHUNK_BLOCKS = 1024
"""8 MiB at a time, so that the products need no memory to speak of."""
_ODD = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio as an odd 64-bit number: multiples of it are all different and well mixed."""


def digest(tensor: torch.Tensor) -> int:
    """64 bits of a tensor's shape and bytes, each word in its place; the same on CPU and GPU, in wrapping
    arithmetic. Equal tensors have equal ones; for others a match is a chance of 2⁻⁶⁴ or so."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    words = (
        flat[:whole].view(torch.int64) if flat.data_ptr() % 8 == 0 else flat[:whole].clone().view(torch.int64)
    )
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    chunk = _WORDS * _CHUNK_BLOCKS
    for start in range(0, len(words), chunk):
        total = total + (2 * (start // chunk) + 1) * _of_chunk(words[start : start + chunk])
    if whole < len(flat):
        rest = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        rest[: len(flat) - whole] = flat[whole:]
        total = total * _ODD + rest.view(torch.int64)[0]
    for size in tensor.shape:
        total = total * _ODD + size
    return int(total)


def _of_chunk(words: torch.Tensor) -> torch.Tensor:
    """Each word times an odd number of its place in the block, each block times one of its own."""
    blocks = len(words) // _WORDS
    place = (torch.arange(_WORDS, device=words.device) * 2 + 1) * _ODD
    total = (words[blocks * _WORDS :] * place[: len(words) - blocks * _WORDS]).sum()
    if blocks:
        sums = (words[: blocks * _WORDS].view(blocks, _WORDS) * place).sum(dim=1)
        total = total * _ODD + (sums * (torch.arange(blocks, device=words.device) * 2 + 1)).sum()
    return total


def sum_of_values(tensor: torch.Tensor) -> int:
    """The sum of all float32 bit patterns modulo 2³²: the same in any order, in float32 and bfloat16,
    and with zeros of padding."""
    values = tensor.detach()
    # Sums of a type into itself are vectorised; torch's own choice, int64, is eighty times slower.
    if values.dtype == torch.bfloat16:
        # The upper half of the same float32.
        return (int(values.view(torch.int16).sum(dtype=torch.int16)) << 16) % 2**32
    return int(values.float().view(torch.int32).sum(dtype=torch.int32)) % 2**32
