"""The wire format of weights: what goes in comes out, and nothing damaged or misplaced passes."""

import pytest
import torch

from rl_cluster.errors import WeightSyncError
from rl_cluster.weights import wire as weight_wire
from rl_cluster.weights.wire import TensorMeta, fill_buckets, plan_buckets, verify

TENSORS = [
    ("a", torch.arange(10, dtype=torch.float32)),
    ("b", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)),
    ("c", torch.randn(50, 40, generator=torch.Generator().manual_seed(0))),
    ("scalar", torch.tensor(7, dtype=torch.int64)),
]
METADATA = [TensorMeta(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in TENSORS]


def test_tensors_lie_at_multiples_of_64_bytes_and_fill_buckets_up_to_the_limit():
    buckets = plan_buckets(METADATA, bucket_bytes=200)
    names = [[slot.meta.name for slot in bucket.slots] for bucket in buckets]
    assert names == [["a", "b"], ["c"], ["scalar"]], "c is larger than the limit and stands alone"
    assert [slot.offset for slot in buckets[0].slots] == [0, 64]
    assert [bucket.num_bytes for bucket in buckets] == [8192 + 24] * 3
    assert len(plan_buckets(METADATA, bucket_bytes=10**6)) == 1
    assert plan_buckets([], 100) == ()


@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
def test_what_is_filled_in_comes_out_bit_for_bit(bucket_bytes):
    buckets = plan_buckets(METADATA, bucket_bytes)
    received = []
    for bucket, buffer in zip(buckets, fill_buckets(buckets, [TENSORS[:1], TENSORS[1:]], 3), strict=True):
        verify(bucket, buffer, 3)
        received.extend((name, tensor.clone()) for name, tensor in bucket.views(buffer))
    assert [name for name, _ in received] == [name for name, _ in TENSORS]
    for (_, sent), (_, got) in zip(TENSORS, received, strict=True):
        assert sent.dtype == got.dtype
        assert torch.equal(sent, got)


def test_the_checksum_is_the_weighted_sum_of_blocks():
    words = torch.arange(3 * 1024, dtype=torch.int64)
    blocks = [sum(range(1024)), sum(range(1024, 2048)), sum(range(2048, 3072))]
    expected = blocks[0] + 2 * blocks[1] + 3 * blocks[2]
    assert int(weight_wire.checksum(words.view(torch.uint8))) == expected


def test_damage_exchange_and_staleness_are_noticed():
    buckets = plan_buckets(METADATA, 200)
    first, second, _ = (b.clone() for b in fill_buckets(buckets, [TENSORS], 5))
    for place in (0, 100, 8191, 8192):
        damaged = first.clone()
        damaged[place] ^= 4
        with pytest.raises(WeightSyncError, match="bucket 0 of version 5 arrived damaged"):
            verify(buckets[0], damaged, 5)
    with pytest.raises(WeightSyncError, match="marked as bucket 1 of version 5"):
        verify(buckets[0], second, 5)
    with pytest.raises(WeightSyncError, match="version 6"):
        verify(buckets[0], first, 6)


def test_two_exchanged_blocks_are_noticed():
    bucket = plan_buckets([TensorMeta("w", "float32", (4096,))], 10**6)[0]
    (buffer,) = fill_buckets([bucket], [[("w", torch.randn(4096))]], 1)
    exchanged = torch.cat([buffer[8192:16384], buffer[:8192], buffer[16384:]])
    with pytest.raises(WeightSyncError):
        verify(bucket, exchanged, 1)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([TENSORS[:3]], "fewer tensors"),
        ([TENSORS[:2]], "fewer tensors"),
        ([[TENSORS[1], TENSORS[0]]], "yielded 'b'"),
        ([[("a", torch.zeros(11))]], r"yielded 'a' \(11,\)"),
        ([[*TENSORS, ("d", torch.zeros(1))]], "after the last"),
    ],
)
def test_a_learner_that_contradicts_its_metadata_is_an_error(groups, message):
    with pytest.raises(WeightSyncError, match=message):
        list(fill_buckets(plan_buckets(METADATA, 200), groups, 1))
