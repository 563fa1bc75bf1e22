"""The engine against transformers: the same tokens and log-probabilities, whoever shares the batch."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch

from rl_cluster.assembly.local_rollout import LocalGenerator
from rl_cluster.modeling.load import load_policy
from tests.actors.publishing import PROMPT, sampling, transformers_logprobs

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack]


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def first_weights(engine, publishing, policy):
    """Tests of other files publish: start from the checkpoint's weights as version 0."""
    await publishing.publish(policy, version=0)


async def test_logprobs_are_those_of_transformers_at_the_temperature_used(engine, policy):
    sample = await engine.generate(PROMPT, 11, sampling(24, temperature=0.7))
    tokens = PROMPT + sample.tokens.tolist()
    expected = transformers_logprobs(policy, tokens, temperature=0.7)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
    assert sample.versions.tolist() == [0] * len(sample.tokens)


async def test_a_seed_gives_the_same_sample_alone_and_among_others(engine):
    alone = await engine.generate(PROMPT, 5, sampling(20))
    others = [engine.generate([4 + i % 9, 13], 100 + i, sampling(20)) for i in range(30)]
    together = (await asyncio.gather(*others, engine.generate(PROMPT, 5, sampling(20))))[-1]
    assert alone.tokens.tolist() == together.tokens.tolist()
    assert alone.logprobs.tobytes() == together.logprobs.tobytes()
    different = await engine.generate(PROMPT, 6, sampling(20))
    assert different.tokens.tolist() != alone.tokens.tolist()


async def test_temperature_zero_is_greedy_with_logprobs_of_the_raw_distribution(engine, policy):
    sample = await engine.generate(PROMPT, 0, sampling(12, temperature=0.0))
    expected = policy.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, len(PROMPT) :]
    assert sample.tokens.tolist() == expected.tolist()
    raw = transformers_logprobs(policy, PROMPT + expected.tolist())[len(PROMPT) - 1 :]
    np.testing.assert_allclose(sample.logprobs, raw, atol=1e-4)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 4, 1.0), (1.0, -1, 0.6), (1.3, 6, 0.8), (0.0, 3, 0.5)]
)
async def test_truncation_leaves_the_reported_logprobs_those_of_all_tokens(
    engine, policy, scratch_folder, temperature, top_k, top_p
):
    spec = sampling(16, temperature=temperature, top_k=top_k, top_p=top_p)
    free = sampling(16, temperature=temperature)
    tokenizer = engine.tokenizer
    generator = LocalGenerator(
        load_policy(str(scratch_folder), dtype="float32"), tokenizer, frozenset({1}), 8
    )
    # Requests that share a batch with it may draw otherwise.
    drawn = await asyncio.gather(
        *[engine.generate(PROMPT, seed, s) for seed in range(8) for s in (spec, free)]
    )
    local = [await generator.generate(PROMPT, seed, spec) for seed in range(8)]
    generator.close()
    for sample, truncates in [*((s, i % 2 == 0) for i, s in enumerate(drawn)), *((s, True) for s in local)]:
        logits = logits_after(policy, PROMPT + sample.tokens.tolist())[len(PROMPT) - 1 : -1]
        expected = (logits / (temperature or 1.0)).log_softmax(-1)
        chosen = expected.gather(-1, torch.from_numpy(sample.tokens).long()[:, None])[:, 0]
        np.testing.assert_allclose(sample.logprobs, chosen.numpy(), atol=1e-4)
        if truncates and top_k > 0:
            assert (
                (logits > logits.gather(-1, torch.from_numpy(sample.tokens).long()[:, None])).sum(-1) < top_k
            ).all()


def logits_after(policy, tokens):
    with torch.no_grad():
        return policy(torch.tensor([tokens])).logits[0].float()


async def test_samples_are_drawn_from_the_distribution_they_report(engine, policy):
    """4000 first tokens against the exact distribution: the largest deviation stays within 4.5 sigma."""
    with torch.no_grad():
        exact = torch.softmax(policy(torch.tensor([PROMPT])).logits[0, -1], -1).double().numpy()
    drawn = await asyncio.gather(*[engine.generate(PROMPT, seed, sampling(1)) for seed in range(4000)])
    observed = np.bincount([int(s.tokens[0]) for s in drawn], minlength=len(exact)) / len(drawn)
    sigma = np.sqrt(exact * (1 - exact) / len(drawn))
    assert np.max(np.abs(observed - exact) / sigma) < 4.5


async def test_a_stop_token_ends_a_response_and_stays_in_it(engine):
    free = await engine.generate(PROMPT, 21, sampling(30))
    stop = int(free.tokens[9])
    first = free.tokens.tolist().index(stop)
    sample = await engine.generate(PROMPT, 21, sampling(30, stop_token_ids=(stop,)))
    assert sample.finish_reason == "stop"
    assert sample.tokens.tolist() == free.tokens.tolist()[: first + 1]


async def test_a_stop_string_ends_a_response_and_stays_in_it(engine):
    candidates = await asyncio.gather(*[engine.generate(PROMPT, s, sampling(12)) for s in range(60)])
    seed = next(i for i, c in enumerate(candidates) if len(c.tokens) == 12 and c.tokens.min() > 2)
    free = candidates[seed]
    text = engine.tokenizer.decode(free.tokens.tolist())
    stop = text[6:8]
    sample = await engine.generate(PROMPT, seed, sampling(12, stop=(stop,)))
    assert sample.finish_reason == "stop"
    assert engine.tokenizer.decode(sample.tokens.tolist()) == text[: text.index(stop) + len(stop)]
    assert sample.logprobs.tobytes() == free.logprobs[: len(sample.tokens)].tobytes()


async def test_the_end_token_ends_a_response_and_the_limit_truncates_it(engine):
    assert engine.eos_token_ids == {1}
    samples = await asyncio.gather(*[engine.generate(PROMPT, s, sampling(200)) for s in range(20)])
    ended = [s for s in samples if s.finish_reason == "stop"]
    assert ended
    assert all(s.tokens[-1] == 1 and 1 not in s.tokens[:-1] for s in ended)
    short = await asyncio.gather(*[engine.generate(PROMPT, s, sampling(2)) for s in range(20)])
    truncated = [s for s in short if s.finish_reason == "length"]
    assert truncated
    assert all(len(s.tokens) == 2 and 1 not in s.tokens for s in truncated)


async def test_prompt_logprobs_are_those_of_transformers(engine, policy):
    tokens = [3 + (7 * i) % 18 for i in range(60)]
    found = await engine.prompt_logprobs(tokens)
    np.testing.assert_allclose(found, transformers_logprobs(policy, tokens), atol=1e-4)


async def test_the_end_token_can_be_ignored_as_a_stop_of_its_own_is_not(engine):
    tokens = [await engine.generate(PROMPT, s, replace(sampling(40), ignore_eos=True)) for s in range(20)]
    assert [(len(s.tokens), s.finish_reason) for s in tokens] == [(40, "length")] * 20
    assert any(1 in s.tokens[:-1] for s in tokens)
    own = replace(sampling(40), ignore_eos=True, stop_token_ids=(1,))
    for seed in range(20):
        assert (await engine.generate(PROMPT, seed, own)).tokens.tolist() == (
            await engine.generate(PROMPT, seed, sampling(40))
        ).tokens.tolist()
