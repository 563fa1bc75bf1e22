"""Weights published into a running engine: exact, in flight, and never half."""

import asyncio
import time

import numpy as np
import pytest

from actors import vllm_compat
from rl_cluster.errors import DeadlineError, WeightSyncError
from tests.actors.publishing import (
    PROMPT,
    layer_groups,
    metadata,
    perturb,
    sampling,
    transformers_logprobs,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack]

LONG_PROMPT = [3 + (5 * i) % 18 for i in range(300)]
"""Longer than two cache blocks (128 tokens on CPUs), so that a prefix of it is cached."""
AFTER_THE_CACHE = ["lm_head", "layers.1.mlp", "model.norm"]
"""Parameters behind the last attention: with only these changed, cached keys and values stay exact."""


async def wait_for_tokens(engine, num_tokens):
    """Of requests that end by themselves after 20 tokens or so."""
    start = engine.generated_tokens
    await asyncio.sleep(0)
    while engine.generated_tokens < start + num_tokens:
        engine.check_alive()
        assert engine.running, f"only {engine.generated_tokens - start} tokens came"
        await asyncio.sleep(0.01)


async def test_logprobs_agree_after_each_of_three_publications(engine, publishing, policy):
    for version in (1, 2, 3):
        sent, pause = await publishing.publish(perturb(policy, ["."], seed=version), version)
        assert sent >= sum(m.num_bytes for m in metadata(policy))
        assert pause > 0
        sample = await engine.generate(LONG_PROMPT, 40, sampling(24))
        expected = transformers_logprobs(policy, LONG_PROMPT + sample.tokens.tolist())[len(LONG_PROMPT) - 1 :]
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
        assert set(sample.versions.tolist()) == {version}


async def test_each_part_of_a_response_has_the_logprobs_of_its_version(engine, publishing, policy):
    await publishing.publish(policy, 4)
    running = [asyncio.ensure_future(engine.generate(PROMPT, s, sampling(300))) for s in range(40)]
    await wait_for_tokens(engine, 40 * 20)
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    await publishing.publish(perturb(policy, AFTER_THE_CACHE, seed=9), 5)
    samples = await asyncio.gather(*running)
    new = [transformers_logprobs(policy, PROMPT + s.tokens.tolist())[len(PROMPT) - 1 :] for s in samples]
    policy.load_state_dict(before, strict=False)
    old = [transformers_logprobs(policy, PROMPT + s.tokens.tolist())[len(PROMPT) - 1 :] for s in samples]
    mixed = [i for i, s in enumerate(samples) if len(set(s.versions.tolist())) == 2]
    assert len(mixed) > 3
    for i in range(len(samples)):
        expected = np.where(samples[i].versions == 4, old[i], new[i])
        np.testing.assert_allclose(samples[i].logprobs, expected, atol=1e-4)
    for i in mixed:
        switch = int(np.argmax(samples[i].versions == 5))
        assert set(samples[i].versions[switch:].tolist()) == {5}
        assert np.abs(old[i] - new[i])[switch - 1 : switch + 1].min() > 1e-3, "the test could not tell"


async def test_our_own_count_of_versions_is_that_of_vllm(engine, publishing, policy, monkeypatch):
    if not vllm_compat.REPORTS_VERSIONS:
        pytest.skip("this vLLM does not report weight versions, so there is nothing to compare with")
    pairs = []

    def both(request_id, begun, output):
        counted = engine._counted_versions(request_id, begun, len(output.token_ids))
        if output.finish_reason != "abort":
            pairs.append((vllm_compat.reported_versions(output), counted))
        return counted

    monkeypatch.setattr(engine, "_versions", both)
    await publishing.publish(policy, 6)
    running = [asyncio.ensure_future(engine.generate(PROMPT, s, sampling(250))) for s in range(300)]
    for version in (7, 8):
        await wait_for_tokens(engine, 1500)
        await publishing.publish(policy, version)
    await asyncio.gather(*running)
    assert len(pairs) == 300
    for reported, counted in pairs:
        assert reported.tolist() == counted.tolist()
    assert {v for reported, _ in pairs for v in reported.tolist()} == {6, 7, 8}
    assert sum(len(set(reported.tolist())) > 1 for reported, _ in pairs) > 20


async def test_requests_without_a_token_start_afresh_under_the_new_weights(engine, publishing, policy):
    """More requests than the engine runs at once: those that waited must not use a prefix of old weights."""
    await publishing.publish(policy, 9)
    running = [asyncio.ensure_future(engine.generate(LONG_PROMPT, s, sampling(60))) for s in range(160)]
    await wait_for_tokens(engine, 400)
    await publishing.publish(perturb(policy, ["."], seed=77), 10)
    samples = await asyncio.gather(*running)
    fresh = [s for s in samples if set(s.versions.tolist()) == {10}]
    assert len(fresh) >= 64
    for sample in fresh:
        expected = transformers_logprobs(policy, LONG_PROMPT + sample.tokens.tolist())[len(LONG_PROMPT) - 1 :]
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


async def test_a_damaged_bucket_is_refused_and_a_complete_update_heals(
    engine, publishing, policy, monkeypatch
):
    await publishing.publish(policy, 11)
    import rl_cluster.weights.wire as wire

    seal = wire.seal

    def damage(bucket, buffer, version):
        sealed = seal(bucket, buffer, version)
        if bucket.index == 1:
            sealed[5] ^= 1
        return sealed

    monkeypatch.setattr(wire, "seal", damage)
    with pytest.raises((WeightSyncError, DeadlineError)):
        await publishing.publish(perturb(policy, ["."], seed=5), 12, timeout_seconds=5)
    with pytest.raises(WeightSyncError, match="bucket 1 of version 12 arrived damaged"):
        await engine.generate(PROMPT, 0, sampling(4))
    monkeypatch.setattr(wire, "seal", seal)
    await publishing.connect()
    await publishing.publish(policy, 12)
    sample = await engine.generate(PROMPT, 0, sampling(16))
    expected = transformers_logprobs(policy, PROMPT + sample.tokens.tolist())[len(PROMPT) - 1 :]
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


async def test_a_sender_that_stops_in_the_middle_leaves_a_refusing_engine_that_can_be_healed(
    engine, publishing, policy
):
    await publishing.connect(timeout_seconds=3)
    running = [asyncio.ensure_future(engine.generate(PROMPT, s, sampling(400))) for s in range(200)]
    await wait_for_tokens(engine, 400)

    def two_groups_then_gone():
        groups = layer_groups(policy)
        yield next(groups)
        yield next(groups)
        raise WeightSyncError("the learner died here")

    def send():
        with pytest.raises(WeightSyncError, match="the learner died here"):
            publishing.sender.send(metadata(policy), two_groups_then_gone(), 13, time.monotonic() + 3)

    receive = asyncio.ensure_future(engine.receive(13, metadata(policy), 6))
    await asyncio.to_thread(send)
    with pytest.raises((WeightSyncError, DeadlineError), match="engine-under-test"):
        await receive
    with pytest.raises(WeightSyncError, match="engine-under-test serves nothing"):
        await engine.generate(PROMPT, 0, sampling(4))
    frozen = [task for task in running if not task.done()]
    assert len(frozen) > 20
    await publishing.connect()
    await publishing.publish(policy, 13)
    outcomes = await asyncio.gather(*frozen, return_exceptions=True)
    resumed = [o for o in outcomes if not isinstance(o, WeightSyncError)]
    assert resumed
    assert all(sample.versions[-1] == 13 for sample in resumed)


async def test_a_receiver_that_never_comes_is_a_deadline_error_for_the_sender(publishing, policy):
    from rl_cluster.weights.channel import Channel

    missing = Channel("gloo", "127.0.0.1", *publishing.sender.rendezvous(), 2, 100_000, 1.0)
    with pytest.raises(DeadlineError, match="1 weight receivers"):
        await asyncio.to_thread(publishing.sender.open, missing)
