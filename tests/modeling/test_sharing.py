"""A prompt that several samples begin with is computed once: same numbers, same gradients, fewer tokens."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_cluster.modeling.packed import ATTENTION, PackedLayout
from rl_cluster.modeling.policy import PolicyModel
from rl_cluster.modeling.sharing import shared_prefixes


def make_rows() -> tuple[np.ndarray, list[int], np.ndarray]:
    """Three samples of one prompt, one of another, one of a prompt that is a prefix of the first."""
    generator = np.random.default_rng(0)
    prompt_a, prompt_b = generator.integers(3, 30, 5), generator.integers(3, 30, 4)
    rows, masks = [], []
    for prompt, count in ((prompt_a, 3), (prompt_b, 6), (prompt_a, 1), (prompt_a, 4), (prompt_a[:3], 2)):
        rows.append(np.concatenate([prompt, generator.integers(3, 30, count)]))
        masks.append(np.arange(len(rows[-1])) >= len(prompt))
    return np.concatenate(rows), [len(row) for row in rows], np.concatenate(masks)


def test_rows_lean_on_the_earlier_row_with_which_they_have_most_in_common() -> None:
    """The last row too, whose prompt is a prefix of the first's, and beyond prompts into what was drawn."""
    tokens, lengths, _ = make_rows()
    assert [n for _, n in shared_prefixes(tokens, lengths)] == [0, 0, 5, 5, 3]
    rows = [[7, 8, 9, 1], [7, 8, 9, 2, 3], [7, 8, 9, 2, 3], [7, 8], [7, 5], [], [7, 8, 9, 2]]
    everything = np.array([token for row in rows for token in row])
    expected = [(0, 0), (0, 3), (1, 5), (0, 2), (4, 0), (5, 0), (1, 4)]
    found = shared_prefixes(everything, [len(row) for row in rows])
    assert [n for _, n in found] == [n for _, n in expected]
    for i, (leader, n) in enumerate(found):
        assert leader <= i
        assert rows[leader][:n] == rows[i][:n]


@pytest.mark.parametrize("alphabet", [2, 3, 30])
def test_as_much_is_shared_as_comparing_every_pair_finds(alphabet: int) -> None:
    generator = np.random.default_rng(alphabet)
    for _ in range(100):
        lengths = generator.integers(1, 9, generator.integers(1, 12)).tolist()
        rows = [generator.integers(0, alphabet, n).tolist() for n in lengths]

        def common(one: list[int], other: list[int]) -> int:
            return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))

        most = [max((common(rows[j], rows[i]) for j in range(i)), default=0) for i in range(len(rows))]
        found = shared_prefixes(np.concatenate(rows), lengths)
        assert [n for _, n in found] == [n if n >= 2 else 0 for n in most]
        for i, (leader, n) in enumerate(found):
            assert leader < i or (leader, n) == (i, 0)
            assert rows[leader][:n] == rows[i][:n]


def test_samples_of_one_prompt_share_at_least_the_prompt() -> None:
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 1000, n) for n in (2, 9, 40)]
    rows = [np.concatenate([p, generator.integers(3, 1000, 12)]) for p in prompts for _ in range(8)]
    found = shared_prefixes(np.concatenate(rows), [len(row) for row in rows])
    assert sum(n for _, n in found) >= 7 * (2 + 9 + 40)


def test_unique_tokens_are_those_that_no_earlier_row_has() -> None:
    tokens, lengths, _ = make_rows()
    layout = PackedLayout.of(lengths, shared_prefixes=shared_prefixes(tokens, lengths))
    assert layout.unique is not None
    assert layout.expand is not None
    assert len(layout.unique) == len(tokens) - 2 * 5 - 3
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
    for prefixes in (None, shared_prefixes(tokens, lengths)):
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
