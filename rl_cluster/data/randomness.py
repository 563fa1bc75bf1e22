"""Every random choice about data: a key of plain values in, numbers out that are the same everywhere.

Built on BLAKE2 and on the raw stream of numpy's Philox (which numpy promises not to change), so a
run's order of prompts and its sampling seeds depend on neither Python, numpy, platform nor process.
"""

from __future__ import annotations

import hashlib

import numpy as np


def hash_bits(*key: int | str, bits: int = 63) -> int:
    """An integer in [0, 2**bits) derived from the key; bits at most 64."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


def permutation(size: int, *key: int | str) -> np.ndarray:
    """int64 [size]: a random order of 0..size-1 that only the key decides."""
    raw = np.random.Philox(key=hash_bits(*key, bits=64)).random_raw(size)
    return np.argsort(np.atleast_1d(raw), kind="stable").astype(np.int64)


def sample_seeds(run_seed: int, group_id: int, num_samples: int, turn: int = 0) -> tuple[int, ...]:
    """One sampling seed per sample, in [0, 2**63), from (run seed, group, sample, turn) and nothing else.

    They do not depend on the worker, the attempt or the number of samples asked for at once.
    """
    return tuple(hash_bits("sample", run_seed, group_id, sample, turn) for sample in range(num_samples))
