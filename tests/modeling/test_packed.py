"""Packed, padded and one by one: the same hidden states, log-probabilities and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rl_cluster.modeling.packed import ATTENTION, PackedLayout, packed_hidden_states
from rl_cluster.modeling.policy import PolicyModel

SIZES = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LENGTHS = {
    "alike": [9, 9, 9],
    "all different": [5, 30, 3, 29, 12, 1, 11, 2],
    "sorted with ties": [20, 20, 7, 7, 7, 1],
    "one": [17],
}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(**SIZES, tie_word_embeddings=True)
        config._attn_implementation = ATTENTION
        return LlamaForCausalLM(config)
    window = (
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1} if kind == "window" else {}
    )
    config = Qwen2Config(**SIZES, **window, tie_word_embeddings=kind == "tied")
    config._attn_implementation = ATTENTION
    return Qwen2ForCausalLM(config)


def one_by_one(lm: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """Plain transformers, eager attention, one row at a time: logits [T, V]."""
    lm.set_attn_implementation("eager")
    logits = torch.cat([lm(row[None]).logits[0] for row in rows])
    lm.set_attn_implementation(ATTENTION)
    return logits


def padded(lm: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """Plain transformers on a right-padded batch: logits [T, V] of the real tokens."""
    longest = max(len(row) for row in rows)
    ids = torch.stack([nn.functional.pad(row, (0, longest - len(row))) for row in rows])
    mask = torch.stack([torch.arange(longest) < len(row) for row in rows]).long()
    lm.set_attn_implementation("sdpa")
    logits = lm(ids, attention_mask=mask).logits[mask.bool()]
    lm.set_attn_implementation(ATTENTION)
    return logits


def gradients(lm: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(lm.parameters())))


@pytest.mark.parametrize("kind", ["qwen2", "tied", "llama", "window"])
@pytest.mark.parametrize("case", LENGTHS)
def test_packed_equals_padded_equals_one_by_one(kind: str, case: str) -> None:
    lm = make_model(kind)
    rows = [torch.randint(0, 40, (n,)) for n in LENGTHS[case]]
    tokens = torch.cat(rows)
    hidden = packed_hidden_states(lm.get_decoder(), tokens, PackedLayout.of(LENGTHS[case]))
    ours = lm.get_output_embeddings()(hidden)
    weights = torch.randn_like(ours)
    results = [
        (x.detach(), gradients(lm, (x * weights).sum()))
        for x in (ours, padded(lm, rows), one_by_one(lm, rows))
    ]
    for logits, gradient in results[1:]:
        assert (results[0][0] - logits).abs().max() < 1e-5
        for a, b in zip(results[0][1], gradient, strict=True):
            assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max()))


def test_no_sequence_sees_another_or_its_own_future() -> None:
    lm = make_model("qwen2")
    layout = PackedLayout.of([4, 6, 5])
    tokens = torch.randint(0, 40, (15,))
    changed = tokens.clone()
    changed[7] = (changed[7] + 1) % 40  # the fourth token of the second sequence
    with torch.no_grad():
        before = packed_hidden_states(lm.get_decoder(), tokens, layout)
        after = packed_hidden_states(lm.get_decoder(), changed, layout)
    moved = (before - after).abs().amax(dim=1) > 0
    assert moved.tolist() == [False] * 7 + [True] * 3 + [False] * 5


def test_nothing_of_the_size_of_all_tokens_squared_is_allocated() -> None:
    lm = make_model("qwen2")
    lengths = [32] * 64
    shapes: list[int] = []
    total = sum(lengths)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                shapes.append(result.numel())
            return result

    with Watch(), torch.no_grad():
        packed_hidden_states(lm.get_decoder(), torch.randint(0, 40, (total,)), PackedLayout.of(lengths))
    assert max(shapes) < total * total / 4


def test_gradient_checkpointing_changes_nothing() -> None:
    tokens, lengths = torch.randint(0, 40, (20,)), [12, 8]
    targets = torch.tensor([3, 4, 11, 15, 19])
    results = []
    for checkpointing in (False, True):
        policy = PolicyModel(make_model("qwen2"), value_head=False)
        policy.train()
        if checkpointing:
            policy.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        logprobs, entropy, _ = policy(tokens, PackedLayout.of(lengths), targets, 0.8)
        (logprobs.sum() + entropy.sum()).backward()
        results.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    assert torch.allclose(results[0], results[1], atol=1e-6)
