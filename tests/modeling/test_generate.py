"""Drawing with a KV cache: against transformers without a cache, numpy, and the same samples drawn alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rl_cluster.modeling.drawing import draw, sample_noise, truncated
from rl_cluster.modeling.generate import Drawing, Generation, Request
from rl_cluster.modeling.kv_cache import BLOCK
from rl_cluster.modeling.packed import ATTENTION
from rl_cluster.modeling.policy import PolicyModel

SIZES = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = ([5, 9, 2], [7, 7, 30, 31, 8, 4, 11], [5, 9, 2], [12], [3] * 20)


def make_policy(kind: str = "qwen2", value_head: bool = False) -> PolicyModel:
    torch.manual_seed(0)
    lm: nn.Module
    if kind == "llama":
        config = LlamaConfig(**SIZES)
        config._attn_implementation = ATTENTION
        lm = LlamaForCausalLM(config)
    else:
        window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        config = Qwen2Config(**SIZES, **(window if kind == "window" else {}))
        config._attn_implementation = ATTENTION
        lm = Qwen2ForCausalLM(config)
    with torch.no_grad():  # sharper than a fresh model, so that an error shows
        lm.get_output_embeddings().weight.mul_(20)
    return PolicyModel(lm, value_head)


def finished(policy: PolicyModel, requests: Sequence[Request], drawing: Drawing, **options) -> Generation:
    generation = Generation(policy, requests, drawing, **options)
    while generation.step():
        pass
    return generation


def full_logits(policy: PolicyModel, prompt: Sequence[int], response: Sequence[int]) -> np.ndarray:
    """float64 [n, V]: what plain transformers predicts before each token of the response."""
    policy.eval()
    policy.lm.set_attn_implementation("eager")
    with torch.no_grad():
        logits = policy.lm(torch.tensor([[*prompt, *response]])).logits[0]
    policy.lm.set_attn_implementation(ATTENTION)
    return logits[len(prompt) - 1 : -1].double().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("kind", ["qwen2", "llama", "window"])
def test_greedy_tokens_and_logprobs_are_those_of_transformers_without_a_cache(kind: str) -> None:
    policy = make_policy(kind)
    requests = [Request(prompt, seed, 12) for seed, prompt in enumerate(PROMPTS)]
    for response in finished(policy, requests, Drawing(0.0)).responses:
        logits = full_logits(policy, response.request.prompt, response.tokens)
        assert response.tokens == logits.argmax(-1).tolist()
        expected = log_softmax(logits)[np.arange(12), response.tokens]
        np.testing.assert_allclose(response.logprobs, expected, atol=2e-5)
        assert response.finish_reason == "length"


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (5, 1.0), (-1, 0.8), (6, 0.7)])
def test_samples_follow_their_noise_through_the_truncated_distribution(top_k: int, top_p: float) -> None:
    policy = make_policy()
    requests = [Request(prompt, 100 + i, 10) for i, prompt in enumerate(PROMPTS)]
    for response in finished(policy, requests, Drawing(0.7, top_k, top_p)).responses:
        logits = full_logits(policy, response.request.prompt, response.tokens) / 0.7
        noise = sample_noise(response.request.seed, 10)
        for place, row in enumerate(logits):
            of_all = log_softmax(row)
            if top_k > 0:
                row = np.where(row >= np.sort(row)[-top_k], row, -np.inf)
            order = np.argsort(-row)
            probabilities = np.exp(log_softmax(row))
            before = np.cumsum(probabilities[order]) - probabilities[order]
            row[order[before >= top_p]] = -np.inf
            probabilities = np.exp(log_softmax(row))
            token = int(np.searchsorted(np.cumsum(probabilities), noise[place], side="right"))
            assert response.tokens[place] == token
            assert response.logprobs[place] == pytest.approx(of_all[token], abs=2e-5)


def test_a_sample_does_not_depend_on_what_shares_its_batch() -> None:
    policy = make_policy()
    drawing = Drawing(1.0)
    stops = frozenset(range(12))  # responses of very different lengths
    requests = [
        Request(PROMPTS[i % 5], i, 70 if i % 2 else 5, stops if i % 3 else frozenset()) for i in range(15)
    ]
    together = finished(policy, requests, drawing).responses
    assert len({len(r.tokens) for r in together}) > 4
    assert max(len(r.tokens) + len(r.request.prompt) for r in together) > BLOCK
    for response in together[::3]:
        (alone,) = finished(policy, [response.request], drawing).responses
        assert alone.tokens == response.tokens
        assert alone.finish_reason == response.finish_reason
        np.testing.assert_allclose(alone.logprobs, response.logprobs, atol=1e-5)


def test_a_sequence_that_ends_early_with_a_long_prompt_does_not_disturb_the_others() -> None:
    policy = make_policy()
    short = [Request([i], i, 60) for i in range(2)]
    long = Request([4] * 100, 9, 1)
    responses = finished(policy, [long, *short], Drawing(1.0)).responses
    assert [len(r.tokens) for r in responses] == [1, 60, 60]
    assert [r.tokens for r in responses[1:]] == [
        r.tokens for r in finished(policy, short, Drawing(1.0)).responses
    ]


def test_responses_end_after_a_stop_token_or_the_token_that_completes_a_stop_string() -> None:
    policy = make_policy()
    (free,) = finished(policy, [Request([5, 9], 3, 20)], Drawing(1.0)).responses
    third = free.tokens[2]
    assert third not in free.tokens[:2]
    (stopped,) = finished(policy, [Request([5, 9], 3, 20, frozenset([third]))], Drawing(1.0)).responses
    assert (stopped.tokens, stopped.finish_reason) == (free.tokens[:3], "stop")
    (last,) = finished(policy, [Request([5, 9], 3, 3, frozenset([third]))], Drawing(1.0)).responses
    assert (last.tokens, last.finish_reason) == (free.tokens[:3], "stop")

    def decode(tokens: Sequence[int]) -> str:
        return "".join(chr(65 + token) for token in tokens)

    text = decode(free.tokens)
    request = Request([5, 9], 3, 20, stop=("never", text[4:6]))
    (stopped,) = finished(policy, [request], Drawing(1.0), decode=decode).responses
    assert decode(stopped.tokens) == text[: text.index(text[4:6]) + 2]
    assert stopped.finish_reason == "stop"


def test_versions_are_those_of_the_steps_that_drew_the_tokens() -> None:
    generation = Generation(make_policy(), [Request([1], 0, 4)], Drawing(1.0))
    assert [generation.step(version) for version in (3, 3, 4, 5)] == [True, True, True, False]
    assert generation.responses[0].versions == [3, 3, 4, 5]


def test_generating_leaves_weights_and_gradients_as_they_were() -> None:
    policy = make_policy(value_head=True).train()
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    finished(policy, [Request([1, 2], 0, 5)], Drawing(1.0))
    for name, parameter in policy.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter, before[name])
        assert parameter.grad is not None
        assert bool((parameter.grad == 1).all())


def test_noise_belongs_to_seed_and_position_alone() -> None:
    noise = sample_noise(7, 6)
    raw = np.random.Philox(key=7).random_raw(6)
    assert noise.tolist() == [(int(word) >> 12) / 2**52 for word in raw]
    assert sample_noise(7, 2).tolist() == noise[:2].tolist()
    assert sample_noise(8, 6).tolist() != noise.tolist()
    assert sample_noise(2**63 - 1, 1).shape == (1,)


def test_draws_have_the_distribution_that_the_logits_say() -> None:
    probabilities = np.array([0.5, 0.0, 0.3, 0.2])
    with np.errstate(divide="ignore"):
        logits = torch.tensor(np.log(probabilities), dtype=torch.float32)
    noise = torch.from_numpy(sample_noise(0, 20_000))
    tokens, logprobs = draw(logits.expand(20_000, 4), noise, 1.0, -1, 1.0)
    counts = np.bincount(tokens.numpy(), minlength=4)
    spread = 4 * np.sqrt(20_000 * probabilities * (1 - probabilities))
    assert (np.abs(counts - 20_000 * probabilities) <= spread).all()
    np.testing.assert_allclose(logprobs.exp().numpy(), probabilities[tokens.numpy()], atol=1e-6)
    ends = torch.tensor([0.0, 1 - 2**-52], dtype=torch.float64)
    last_is_impossible = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    assert draw(last_is_impossible.expand(2, 4), ends, 1.0, -1, 1.0)[0].tolist() == [1, 2]


def test_truncation_keeps_the_fewest_tokens_that_reach_top_p_of_the_top_k() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]]))
    kept = lambda *spec: (truncated(logits, *spec) > -torch.inf).int().tolist()  # noqa: E731
    assert kept(-1, 1.0) == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert kept(2, 1.0)[0] == [0, 1, 1, 0]
    assert kept(-1, 0.75)[0] == [0, 1, 1, 1]
    assert kept(-1, 0.65) == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert kept(2, 0.5)[0] == [0, 1, 0, 0]  # 0.4 of the 0.7 that top_k left
