"""A prompt that several samples begin with is computed once: same numbers, same gradients, fewer tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_cluster.modeling.packed import ATTENTION, PackedLayout
from rl_cluster.modeling.policy import PolicyModel
from rl_cluster.modeling.sharing import shared_prompts


def make_rows() -> tuple[np.ndarray, list[int], np.ndarray]:
    """Three samples of one prompt, one of another, one of a prompt that is a prefix of the first."""
    generator = np.random.default_rng(0)
    prompt_a, prompt_b = generator.integers(3, 30, 5), generator.integers(3, 30, 4)
    rows, masks = [], []
    for prompt, count in ((prompt_a, 3), (prompt_b, 6), (prompt_a, 1), (prompt_a, 4), (prompt_a[:3], 2)):
        rows.append(np.concatenate([prompt, generator.integers(3, 30, count)]))
        masks.append(np.arange(len(rows[-1])) >= len(prompt))
    return np.concatenate(rows), [len(row) for row in rows], np.concatenate(masks)


def test_rows_lean_on_the_first_with_exactly_their_prompt() -> None:
    tokens, lengths, mask = make_rows()
    assert shared_prompts(tokens, lengths, mask) == [(0, 5), (1, 4), (0, 5), (0, 5), (4, 3)]


def test_a_row_without_actions_shares_nothing() -> None:
    assert shared_prompts(np.array([5, 5, 5, 5]), [2, 2], np.zeros(4, dtype=bool)) == [(0, 0), (1, 0)]


def test_unique_tokens_are_those_that_no_earlier_row_has() -> None:
    tokens, lengths, mask = make_rows()
    layout = PackedLayout.of(lengths, shared_prefixes=shared_prompts(tokens, lengths, mask))
    assert layout.unique is not None
    assert layout.expand is not None
    assert len(layout.unique) == len(tokens) - 2 * 5
    assert layout.position_ids.shape == (1, len(layout.unique))
    assert torch.equal(torch.from_numpy(tokens)[layout.unique][layout.expand], torch.from_numpy(tokens))


@pytest.mark.parametrize("sliding_window", [None, 4])
def test_shared_prompts_change_neither_log_probabilities_nor_gradients(sliding_window: int | None) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=sliding_window is not None,
        sliding_window=sliding_window,
        max_window_layers=0,
        attn_implementation=ATTENTION,
    )
    model = PolicyModel(Qwen2ForCausalLM(config), value_head=True)
    tokens, lengths, mask = make_rows()
    targets = torch.from_numpy(np.flatnonzero(mask))
    results = []
    for prefixes in (None, shared_prompts(tokens, lengths, mask)):
        model.zero_grad()
        output = model(torch.from_numpy(tokens), PackedLayout.of(lengths, "cpu", prefixes), targets, 0.7)
        weights = torch.linspace(-1, 1, len(targets))
        (weights * sum(output)).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((output[0].detach(), gradient))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    difference = (results[0][1] - results[1][1]).norm() / results[0][1].norm()
    assert float(results[0][1].norm()) > 0.01
    assert float(difference) < 1e-5
