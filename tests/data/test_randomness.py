"""Seeds and orders are fixed numbers: they may never change between releases, platforms or processes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_cluster.data.randomness import hash_bits, permutation, sample_seeds

SEED_0, SEED_1 = 8040804898272621802, 2813453579572621233
ORDER = [2, 4, 1, 7, 6, 5, 3, 0]


def test_seeds_and_orders_are_the_numbers_that_they_always_were() -> None:
    assert sample_seeds(7, 3, 2) == (SEED_0, SEED_1)
    assert permutation(8, "epoch", 7, 0).tolist() == ORDER


def test_another_process_with_another_hash_seed_derives_the_same_seeds() -> None:
    code = "from rl_cluster.data.randomness import sample_seeds; print(sample_seeds(7, 3, 2))"
    env = {"PYTHONHASHSEED": "12345", "PYTHONPATH": "."}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == str((SEED_0, SEED_1))


def test_a_sample_keeps_its_seed_when_more_samples_are_asked_for() -> None:
    assert sample_seeds(1, 5, 8)[:3] == sample_seeds(1, 5, 3)


def test_every_part_of_the_key_matters() -> None:
    seeds = [
        *sample_seeds(1, 5, 4),
        *sample_seeds(2, 5, 4),
        *sample_seeds(1, 6, 4),
        *sample_seeds(1, 5, 4, turn=1),
        *sample_seeds(1, -5, 4),
    ]
    assert len(set(seeds)) == 20


def test_seeds_fit_into_a_signed_64_bit_integer_and_use_its_width() -> None:
    seeds = sample_seeds(0, 0, 1000)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_strings_and_numbers_in_a_key_are_kept_apart() -> None:
    assert hash_bits("a", 1, 2) != hash_bits("a", 12) != hash_bits("a", "12")


@given(size=st.integers(0, 200), key=st.integers())
def test_an_order_holds_every_index_once(size: int, key: int) -> None:
    assert sorted(permutation(size, key).tolist()) == list(range(size))


def test_orders_are_uniform_over_places() -> None:
    first = np.array([permutation(10, "uniform", key)[0] for key in range(2000)])
    counts = np.bincount(first, minlength=10)
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert chi_square < 27.9  # the 0.1 % point with 9 degrees of freedom
