"""The reference against transformers, and frozen."""

import numpy as np
import pytest

from actors.reference_worker import ReferenceModel, ReferenceSpec, create_reference_worker
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import Prompt, Trajectory, TrajectoryGroup
from tests.actors.publishing import transformers_logprobs


def _group():
    prompt = Prompt("p", np.array([5, 13, 7], dtype=np.int32), "2*4")
    return TrajectoryGroup(0, prompt, tuple(_trajectory(length, 3) for length in (9, 4, 17, 6)))


def _trajectory(length, prompt_length):
    tokens = np.array([3 + (11 * i + length) % 18 for i in range(length)], dtype=np.int32)
    mask = np.arange(length) >= prompt_length
    return Trajectory(
        tokens=tokens,
        action_mask=mask,
        behaviour_logprobs=np.zeros(length, dtype=np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason="length",
        response_text="",
        ended_with_eos=False,
    )


@pytest.mark.parametrize("tokens_per_pass", [1, 14, 1000])
def test_logprobs_are_those_of_transformers_whatever_shares_a_pass(scratch_folder, policy, tokens_per_pass):
    spec = ReferenceSpec(str(scratch_folder), temperature=0.8, tokens_per_pass=tokens_per_pass)
    found = ReferenceModel(spec).logprobs(_group())
    expected = []
    for trajectory in _group().trajectories:
        logprobs = np.concatenate([[0.0], transformers_logprobs(policy, trajectory.tokens, 0.8)])
        expected.append(np.where(trajectory.action_mask, logprobs, 0))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-5)


def test_a_model_that_is_not_there_is_bad_input(tmp_path):
    with pytest.raises(BadInputError, match=r"model\.path"):
        ReferenceModel(ReferenceSpec(str(tmp_path / "nothing")))


@pytest.mark.stack
async def test_the_worker_answers_with_a_ref_and_stays_bit_identical(ray_session, scratch_folder):
    import ray

    spec = ReferenceSpec(str(scratch_folder))
    worker = create_reference_worker("reference", spec)
    await worker.start()
    try:
        before = await worker.checksum()
        assert before == ReferenceModel(spec).checksum()
        ref = await worker.logprobs(ray.put(_group()))
        again = await worker.logprobs(ray.put(_group()))
        assert isinstance(ref, ray.ObjectRef)
        here = ReferenceModel(spec).logprobs(_group())
        assert (await ref).tobytes() == (await again).tobytes() == here.tobytes()
        assert await worker.checksum() == before
    finally:
        worker.close()
