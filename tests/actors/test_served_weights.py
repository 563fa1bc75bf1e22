"""What an engine serves is compared with what it was handed, on a model that fuses and packs as vLLM's do."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from actors.served_weights import ServedWeights
from rl_cluster.weights.digest import digest, sum_of_values

SIZE = 16


class Linear(nn.Module):
    """packed: the weight lives in a closure only, as on CPUs."""

    def __init__(self, rows: int, packed: bool) -> None:
        super().__init__()
        self.input_size, self.packed = SIZE, packed
        self.weight = nn.Parameter(torch.zeros(rows, SIZE))
        self.bias = nn.Parameter(torch.zeros(rows))
        self.load(self.weight.data)

    def load(self, weight: torch.Tensor) -> None:
        self.weight.data = weight.clone()
        if self.packed:
            kept = weight.clone()
            self.cpu_linear = lambda x, _weight, _bias: x @ kept.T
            self.weight.data = torch.empty(0)


class Attention(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = Linear(3 * SIZE, packed), Linear(SIZE, packed)


class Layer(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.self_attn = Attention(packed)
        self.input_layernorm = nn.LayerNorm(SIZE)
        self.mixer = nn.Module()
        self.mixer.decay = nn.Linear(1, 1, bias=False)


class Served(nn.Module):
    """load_weights as vLLM's: fuses q, k and v. ignores: names that it takes and drops."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer(packed) for _ in range(2)])
        self.ignores: set[str] = set()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = {name: tensor for name, tensor in weights if name not in self.ignores}
        for index, layer in enumerate(self.model.layers):
            attention, path = layer.self_attn, f"model.layers.{index}"
            parts = [found.get(f"{path}.self_attn.{part}_proj.weight") for part in "qkv"]
            if all(part is not None for part in parts):
                attention.qkv_proj.load(torch.cat(parts))  # type: ignore[arg-type]
            if f"{path}.self_attn.o_proj.weight" in found:
                attention.o_proj.load(found[f"{path}.self_attn.o_proj.weight"])
            if f"{path}.input_layernorm.weight" in found:
                layer.input_layernorm.weight.data = found[f"{path}.input_layernorm.weight"].clone()
            if f"{path}.mixer.decay.weight" in found:
                layer.mixer.decay.weight.data = -torch.exp(found[f"{path}.mixer.decay.weight"])


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for index in range(2):
        for part in "qkvo":
            name = f"model.layers.{index}.self_attn.{part}_proj.weight"
            weights[name] = torch.randn(SIZE, SIZE, generator=generator)
        weights[f"model.layers.{index}.input_layernorm.weight"] = torch.randn(SIZE, generator=generator)
    return weights


def publish(served: Any, proofs: ServedWeights, version: int, weights: dict[str, torch.Tensor]) -> Any:
    proofs.watch(version)
    served.load_weights(iter(weights.items()))
    return proofs.proof()


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def served(request: pytest.FixtureRequest) -> Served:
    return Served(request.param)


def test_what_is_fused_packed_or_plain_is_found_again_and_every_tensor_has_its_digest(served: Served) -> None:
    proofs = ServedWeights(served, whole=True)
    for version in (0, 1, 2):
        weights = weights_of(version)
        proof = publish(served, proofs, version, weights)
        assert proof["version"] == version and proof["stale"] == []
        assert proof["digests"] == {name: digest(tensor) for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("ignored", "stale"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn"),
        ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn"),
        ("model.layers.1.input_layernorm.weight", "model.layers.1"),
    ],
)
def test_a_layer_that_goes_on_with_the_version_before_is_named(
    served: Served, ignored: str, stale: str
) -> None:
    proofs = ServedWeights(served, whole=True)
    publish(served, proofs, 0, weights_of(0))
    served.ignores = {ignored}
    # As far apart as one update at a learning rate of 1e-6.
    near = {name: tensor + 1e-6 for name, tensor in weights_of(0).items()}
    assert publish(served, proofs, 1, near)["stale"] == [stale]
    served.ignores = set()
    assert publish(served, proofs, 2, near)["stale"] == []


def test_a_copy_that_is_loaded_while_the_old_model_serves_is_found_at_the_first_publication(
    served: Served,
) -> None:
    served.load_weights(iter(weights_of(0).items()))
    copied, proofs = copy.deepcopy(served), ServedWeights(served, whole=True)
    proofs.watch(1)
    copied.load_weights(proofs._noted(weights_of(1).items()))
    assert len(proofs.proof()["stale"]) == 4


def test_a_function_of_a_weight_is_no_stale_layer(served: Served) -> None:
    proofs = ServedWeights(served, whole=True)
    for version in (0, 1):
        weights = weights_of(version)
        weights["model.layers.0.mixer.decay.weight"] = torch.tensor([[0.1 * version]])
        assert publish(served, proofs, version, weights)["stale"] == []


def test_an_output_head_whose_packed_form_is_old_is_named() -> None:
    served = Served(packed=False)
    head = Linear(SIZE, packed=False)
    served.lm_head = head
    head.weight.data = torch.randn(SIZE, SIZE)
    old = head.weight.data.clone()
    head.cpu_linear = lambda x, _weight, _bias: x @ old.T
    for whole in (True, False):
        proofs = ServedWeights(served, whole)
        assert publish(served, proofs, 0, weights_of(0))["stale"] == []
        head.weight.data = old + 1e-6
        assert publish(served, proofs, 1, weights_of(1))["stale"] == ["lm_head"]
        head.weight.data = old.clone()


def test_the_digest_tells_places_shapes_and_single_bits_apart() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    flipped = values.clone()
    flipped.view(torch.int32)[4999] ^= 1
    swapped = values.clone()
    swapped[[7, 8]] = values[[8, 7]]
    far = values.clone()
    far[[0, 4096]] = values[[4096, 0]]
    others = [flipped, swapped, far, values.view(50, 100), values.view(100, 50), values[:-1], values.double()]
    digests = [digest(tensor) for tensor in (values, *others)]
    assert len(set(digests)) == len(digests)
    assert digest(values.clone()) == digest(values) == digest(values.view(50, 100).T.T.reshape(-1))
    odd = torch.randn(3, 7).bfloat16()
    assert digest(odd[1:]) == digest(odd[1:].clone()) != digest(odd[:2])
    big = torch.zeros(3 * 1024 * 1024)
    moved = big.clone()
    big[5], moved[5 + 2 * 1024 * 1024] = 1.0, 1.0
    assert digest(big) != digest(moved)


def test_the_sum_of_values_forgets_order_dtype_and_zeros() -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = sum(int.from_bytes(x.float().numpy().tobytes(), "little", signed=True) for x in values)
    assert sum_of_values(values) == sum_of_values(values.float()) == expected % 2**32
    padded = torch.cat([values.flip(0), torch.zeros(7).bfloat16()])
    assert sum_of_values(padded) == expected % 2**32
    assert sum_of_values(values + 1e-2) != expected % 2**32
