"""Adapters published from a learner into an engine: served by version, without touching what runs."""

import asyncio

import numpy as np
import pytest
import pytest_asyncio

from actors import vllm_compat
from actors.engine_spec import EngineSpec
from actors.rollout_worker import RolloutActor
from learners.spec import LearnerSpec
from learners.start import start_local_learner
from learners.weight_sender import LearnerSender
from rl_cluster.config.run import LoRAConfig
from tests.actors.publishing import PROMPT, perturb, sampling

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.stack, pytest.mark.timeout(600)]

PROBE = [3 + (7 * i) % 18 for i in range(40)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def actor(scratch_folder):
    spec = EngineSpec(
        model=str(scratch_folder), max_model_len=512, max_num_seqs=32, kv_cache_gib=0.25, lora_rank=4
    )
    actor = RolloutActor("rollout-lora", spec)
    await actor.start()
    yield actor
    await actor.shutdown()


def _change(rank, seed):
    perturb(rank.model.lm, ["lora_A"], seed)
    for name, parameter in rank.model.lm.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1


async def test_each_version_of_an_adapter_is_served_and_running_requests_keep_theirs(actor, scratch_folder):
    lora = LoRAConfig(rank=4, alpha=8.0, targets="all-linear")
    learner = start_local_learner(LearnerSpec(model_path=str(scratch_folder), engine="torch", lora=lora))
    sender = LearnerSender(learner, "gloo")
    engine = actor._engine
    gaps, answers = [], []
    running = []
    for version in (0, 1, 2):
        if version:
            await learner.apply(_change, version)
            await actor.set_adapter(version, await sender.adapter(), 60)
            (proof,) = await engine.loaded()
            assert proof == {"version": version, "digests": await sender.digests(), "stale": []}
        answers.append(await sender.probe(np.array(PROBE)))
        gaps.append(np.abs(await engine.prompt_logprobs(PROBE) - answers[-1]).max())
        running += [asyncio.ensure_future(engine.generate(PROMPT, s, sampling(100))) for s in range(20)]
        await asyncio.sleep(0.05)
    samples = await asyncio.gather(*running)
    assert max(gaps) < 1e-3
    assert np.abs(answers[1] - answers[0]).max() > 0.01
    assert np.abs(answers[2] - answers[1]).max() > 0.01
    for index, sample in enumerate(samples):
        assert set(sample.versions.tolist()) == {index // 20}
    for sample in samples[40:]:
        logprobs = await sender.probe(np.array(PROMPT + sample.tokens.tolist()))
        np.testing.assert_allclose(sample.logprobs, logprobs[len(PROMPT) - 1 :], atol=1e-3)
    served = engine._adapter
    engine._adapter = vllm_compat.lora_request("never loaded", 99, served.lora_path)
    assert (await engine.loaded())[0]["stale"] == ["the adapter"]
    engine._adapter = served
    learner.close()
