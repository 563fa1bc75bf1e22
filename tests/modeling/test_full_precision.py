"""What rounding in bfloat16 would hide is seen at load, in float32; the weights come back as they were."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_cluster.modeling import attend as attending
from rl_cluster.modeling import packed
from rl_cluster.modeling.full_precision import in_full_precision
from rl_cluster.modeling.load import load_critic, load_policy
from rl_cluster.modeling.packed import decoder_of, is_packed
from tests.modeling.architectures import SLIDING, Case, save_tiny

LEAK = 0.005
"""Of a neighbour's values in each token's; moves a log-probability by about 0.02 nats."""


def leaking(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
) -> torch.Tensor:
    """Each sequence sees a little of the next one."""
    return attending.attend(query, key, value + LEAK * value.roll(1, 0), *others, **named)


@pytest.mark.parametrize("load", [load_policy, load_critic])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_leak_smaller_than_bfloat16s_rounding_is_seen(
    dtype: Any, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(Case("qwen2"), tmp_path)
    decoder = decoder_of(load(str(tmp_path), dtype=dtype).lm) if load is load_policy else None
    assert decoder is None or is_packed(decoder)
    monkeypatch.setattr(packed, "attend", leaking)
    monkeypatch.setattr(packed, "_into_bucket", together)
    with caplog.at_level(logging.WARNING):
        model = load(str(tmp_path), dtype=dtype)
    assert not is_packed(decoder_of(model.lm) if load is load_policy else model.trunk)
    assert caplog.text.count("padded rows") == 1


def together(states: torch.Tensor, bucket: packed.Bucket) -> torch.Tensor:
    """As packed._into_bucket, with copies of its own."""
    places = bucket.gather if bucket.gather is not None else torch.arange(bucket.start, bucket.stop)
    return states[places].unflatten(0, (bucket.num_sequences, bucket.length)).transpose(1, 2)


def test_weights_layers_and_types_come_back_bit_for_bit(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 3
    save_tiny(
        Case("qwen2", SLIDING | {"layer_types": kinds, "num_hidden_layers": 6, "use_sliding_window": True}),
        tmp_path,
    )
    lm = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = {name: (t.data_ptr(), t.dtype, t.clone()) for name, t in lm.state_dict().items()}
    layers = lm.model.layers
    with in_full_precision(lm, lm.model) as possible:
        assert possible
        assert len(lm.model.layers) == 4  # the first full_attention is the fourth
        assert {p.dtype for p in lm.parameters()} == {torch.float32}
    assert lm.model.layers is layers
    assert len(layers) == 6
    after = lm.state_dict()
    assert after.keys() == before.keys()
    for name, (place, dtype, values) in before.items():
        assert (after[name].data_ptr(), after[name].dtype) == (place, dtype)
        assert torch.equal(after[name], values)


def test_a_quantised_model_stays_as_it_is() -> None:
    lm = torch.nn.Sequential(torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    lm.register_parameter("packed", torch.nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False))
    with in_full_precision(lm, lm) as possible:
        assert not possible
        assert lm[0].weight.dtype == torch.bfloat16
