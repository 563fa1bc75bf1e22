"""Receivers that fail in silence inside a real engine are found, however small the update."""

import asyncio
import os

import numpy as np
import pytest
import pytest_asyncio

from actors.engine_spec import EngineSpec
from learners.spec import LearnerSpec
from learners.start import start_local_learner
from learners.weight_sender import LearnerSender
from rl_cluster.errors import WeightSyncError
from rl_cluster.loop.publisher import EnginePublisher, PublisherSpec
from tests.actors.publishing import PROMPT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.stack, pytest.mark.timeout(600)]

PROBE = np.array([3 + (7 * i) % 18 for i in range(32)], dtype=np.int32)
CODE_MAY_TRAVEL = "VLLM_ALLOW_INSECURE_SERIALIZATION"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(scratch_folder):
    from actors.engine import Engine

    # A variable of vLLM's, so that the tests can put faults into its process.
    os.environ[CODE_MAY_TRAVEL] = "1"
    spec = EngineSpec(
        model=str(scratch_folder), max_model_len=256, max_num_seqs=8, kv_cache_gib=0.25, num_threads=1
    )
    engine = await Engine.start(spec, name="rollout-0")
    engine.num_ranks = 1
    yield engine
    engine.shutdown()
    os.environ.pop(CODE_MAY_TRAVEL, None)


@pytest.fixture(scope="module")
def learner(scratch_folder):
    group = start_local_learner(LearnerSpec(model_path=str(scratch_folder), engine="torch"))
    yield group
    group.close()


class Sender(LearnerSender):
    """A learner in this process blocks while it meets the receiver, which lives on the same event loop."""

    async def open(self, channel):
        await asyncio.to_thread(asyncio.run, super().open(channel))

    async def send(self, version, seconds):
        return await asyncio.to_thread(asyncio.run, super().send(version, seconds))


def _one_small_update(rank):
    """By 1e-6, as an update at that learning rate: far below what a probe's tolerance can see."""
    for parameter in rank.model.lm.parameters():
        parameter.data += 1e-6


def receives_and_loads_nothing(worker):
    engine = worker.weight_transfer_engine
    model, receive = engine.model, engine.receive_weights

    def unloading(update):
        engine.model = _Unloading()
        receive(update)
        engine.model = model

    engine.receive_weights = unloading


class _Unloading:
    def load_weights(self, weights):
        return {name for name, _ in weights}


def loads_half(worker):
    model = type(worker.model_runner.get_model())
    model.honest = model.load_weights

    def half(self, weights):
        return model.honest(self, list(weights)[::2])

    model.load_weights = half


def serves_a_layer_of_the_version_before(worker):
    """The loader takes every tensor and drops those of one layer behind the caller's back."""
    model = type(worker.model_runner.get_model())
    model.honest = model.load_weights

    def without_a_layer(self, weights):
        return model.honest(self, [(n, t) for n, t in list(weights) if ".layers.1.mlp." not in n])

    model.load_weights = without_a_layer


def swaps_tensors_of_equal_shape(worker):
    from rl_cluster.weights.wire import Bucket

    Bucket.honest = Bucket.views

    def swapped(self, buffer):
        views = Bucket.honest(self, buffer)
        q, k = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight")
        return [({q: k, k: q}.get(name, name), tensor) for name, tensor in views]

    Bucket.views = swapped


def changes_one_bit_after_the_checksum(worker):
    from rl_cluster.weights.wire import Bucket

    Bucket.honest = Bucket.views

    def damaged(self, buffer):
        buffer[1] ^= 1
        return Bucket.honest(self, buffer)

    Bucket.views = damaged


def heal(worker):
    from rl_cluster.weights.wire import Bucket

    for owner, name in ((type(worker.model_runner.get_model()), "load_weights"), (Bucket, "views")):
        if "honest" in vars(owner):
            setattr(owner, name, owner.honest)
            del owner.honest
    vars(worker.weight_transfer_engine).pop("receive_weights", None)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (receives_and_loads_nothing, "tensors were not loaded"),
        (loads_half, "what it serves is not what it loaded|failed"),
        (
            serves_a_layer_of_the_version_before,
            r"what it serves is not what it loaded: model\.layers\.1\.mlp",
        ),
        (swaps_tensors_of_equal_shape, r"2 of \d+ tensors are not the learner's"),
        (changes_one_bit_after_the_checksum, r"tensors are not the learner's"),
    ],
)
async def test_a_receiver_that_does_not_serve_what_was_sent_is_found_at_the_first_small_update(
    engine, learner, fault, told
):
    spec = PublisherSpec("gloo", 200_000, 20, (PROBE, PROBE[:9]), tolerance=2e-3, prove=True)
    publisher = EnginePublisher(spec, Sender(learner, "gloo"), [engine])
    await publisher.publish(1)
    await engine._llm.collective_rpc(fault)
    try:
        await learner.apply(_one_small_update)
        with pytest.raises(WeightSyncError, match=f"(?s)({told})"):
            await publisher.publish(2)
    finally:
        await engine._llm.collective_rpc(heal)
    assert (await publisher.publish(3)).version == 3
    expected = await LearnerSender(learner, "gloo").probe(np.array(PROMPT))
    np.testing.assert_allclose(await engine.prompt_logprobs(PROMPT), expected, atol=1e-4)
