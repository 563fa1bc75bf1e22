"""Rollout worker and publisher together, on Ray: a learner in this process, an engine in another.

One engine for the whole file, so the tests build on each other: the last one kills it.
"""

import asyncio
import os
import signal
import threading
from functools import partial

import numpy as np
import psutil
import pytest
import pytest_asyncio

from actors.engine_spec import EngineSpec
from actors.rollout_worker import create_rollout_worker
from learners.spec import LearnerSpec
from learners.start import start_local_learner
from learners.weight_sender import LearnerSender
from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.environments import Observation, RLEnvironment, StepResult
from rl_cluster.errors import BadInputError, DeadlineError, WeightSyncError, WorkerDiedError
from rl_cluster.loop.publisher import EnginePublisher, PublisherSpec
from rl_cluster.trajectory import GroupTask, Prompt
from tests.actors.publishing import PROMPT, perturb, sampling, transformers_logprobs

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.stack, pytest.mark.timeout(600)]

PROBE = np.array([3 + (7 * i) % 18 for i in range(32)], dtype=np.int32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(ray_session, scratch_folder):
    spec = EngineSpec(model=str(scratch_folder), max_model_len=256, max_num_seqs=32, kv_cache_gib=0.25)
    worker = create_rollout_worker("rollout-0", spec)
    await worker.start(deadline_seconds=300)
    yield worker
    await worker.shutdown()


@pytest.fixture(scope="module")
def learner(scratch_folder):
    group = start_local_learner(LearnerSpec(model_path=str(scratch_folder), engine="torch"))
    yield group
    group.close()


@pytest.fixture(scope="module")
def publisher(learner, worker):
    return _publisher(learner, worker, deadline_seconds=60)


def _publisher(learner, worker, deadline_seconds, probe_tolerance=1e-3):
    spec = PublisherSpec("gloo", 200_000, deadline_seconds, PROBE, probe_tolerance)
    return EnginePublisher(spec, LearnerSender(learner, "gloo"), [worker])


def _task(group_id=7, max_new_tokens=12, num_samples=4):
    prompt = Prompt("p", np.array(PROMPT, dtype=np.int32), "2*4=", {"answer": "8"})
    return GroupTask(group_id, prompt, tuple(range(50, 50 + num_samples)), sampling(max_new_tokens))


def _perturb(rank, seed):
    perturb(rank.model.lm, ["."], seed)


async def test_a_rollout_gives_a_summary_here_and_the_group_in_the_object_store(worker):
    summary, ref = await worker.rollout(_task())
    group = await ref
    assert (summary.group_id, summary.worker, summary.min_version, summary.max_version) == (
        7,
        "rollout-0",
        0,
        0,
    )
    assert summary.lengths == tuple(len(t.tokens) for t in group.trajectories)
    assert len({t.tokens.tobytes() for t in group.trajectories}) > 1
    for trajectory in group.trajectories:
        assert trajectory.tokens[:4].tolist() == PROMPT
        assert trajectory.action_mask.tolist() == [False] * 4 + [True] * (len(trajectory.tokens) - 4)
        assert trajectory.policy_versions[:4].tolist() == [-1] * 4
        assert trajectory.ended_with_eos == (trajectory.tokens[-1] == 1)
        assert trajectory.finish_reason == ("stop" if trajectory.ended_with_eos else "length")
    again = await (await worker.rollout(_task()))[1]
    assert [t.tokens.tobytes() for t in again.trajectories] == [
        t.tokens.tobytes() for t in group.trajectories
    ]


async def test_published_weights_are_proved_and_served(worker, learner, publisher, policy):
    for version in (1, 2):
        await learner.apply(_perturb, version)
        report = await publisher.publish(version)
        assert report.version == version
        assert report.num_bytes >= sum(p.numel() * 4 for p in policy.parameters())
        assert 0 < report.pause_seconds <= report.seconds
    group = await (await worker.rollout(_task()))[1]
    perturb(perturb(policy, ["."], 1), ["."], 2)
    for trajectory in group.trajectories:
        expected = transformers_logprobs(policy, trajectory.tokens)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(trajectory.behaviour_logprobs[len(PROMPT) :], expected, atol=1e-4)
        assert set(trajectory.policy_versions[len(PROMPT) :].tolist()) == {2}


async def test_progress_counts_tokens_requests_and_memory(worker):
    before = await worker.progress()
    summary, _ = await worker.rollout(_task())
    after = await worker.progress()
    assert after.tokens - before.tokens == sum(summary.action_counts)
    assert (after.running, after.version) == (0, 2)
    assert after.rss_bytes > 100 * 2**20


async def test_an_engine_that_disagrees_with_the_learner_is_named(worker, learner, monkeypatch):
    monkeypatch.setattr(LearnerSender, "probe", lambda self, tokens: _zeros(len(tokens) - 1))
    with pytest.raises(WeightSyncError, match="rollout-0 does not serve version 3"):
        await _publisher(learner, worker, deadline_seconds=60).publish(3)


async def _zeros(number):
    return np.zeros(number, dtype=np.float32)


async def test_an_engine_that_hangs_is_named_and_serves_nothing_until_it_has_a_complete_update(
    worker, learner, publisher
):
    impatient = _publisher(learner, worker, deadline_seconds=4)
    await impatient.publish(3)
    engine_core = worker.pids[-1]
    os.kill(engine_core, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match="rollout-0"):
            await impatient.publish(4)
    finally:
        os.kill(engine_core, signal.SIGCONT)
    with pytest.raises(WeightSyncError, match="rollout-0 serves nothing"):
        await worker.rollout(_task())
    await asyncio.sleep(5)
    await _publisher(learner, worker, deadline_seconds=60).publish(4)
    summary, _ = await worker.rollout(_task())
    assert (summary.min_version, summary.max_version) == (4, 4)


class PaysPerToken(RLEnvironment):
    """One response per episode; pays 1 per token of it."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def reset(self):
        raise AssertionError("a run starts episodes with `start`")

    def start(self, prompt, metadata, seed):
        return Observation([PROMPT], [[1] * len(PROMPT)], prompt)

    def step(self, action):
        return StepResult(float(len(action)), True, metrics={"tokens": float(len(action))})


class Door(PaysPerToken):
    def __init__(self, tokenizer):
        raise KeyError("door")


async def test_an_environment_travels_to_the_worker_and_plays_there(worker):
    settings = EnvironmentConfig()
    with pytest.raises(BadInputError, match="making the environment: KeyError: 'door'"):
        await worker.set_environment(Door, settings, 60)
    with pytest.raises(BadInputError, match="cannot be sent to the rollout workers: TypeError"):
        await worker.set_environment(partial(PaysPerToken, threading.Lock()), settings, 60)
    await worker.set_environment(PaysPerToken, settings, 60)
    summary, ref = await worker.rollout(_task())
    group = await ref
    assert tuple(int(t.reward) for t in group.trajectories) == summary.action_counts
    assert [t.components["tokens"] for t in group.trajectories] == [t.reward for t in group.trajectories]


async def test_a_killed_worker_is_named_and_takes_its_engine_along(worker, learner):
    assert all(psutil.pid_exists(pid) for pid in worker.pids)
    os.kill(worker.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rollout-0"):
        await worker.rollout(_task())
    with pytest.raises(WorkerDiedError, match="rollout-0"):
        await _publisher(learner, worker, deadline_seconds=3).publish(5)
    _gone, alive = psutil.wait_procs(
        [psutil.Process(p) for p in worker.pids if psutil.pid_exists(p)], timeout=20
    )
    assert alive == []
