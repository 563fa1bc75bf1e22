"""What environments pay reaches the loop, and what they break is retried, dropped and counted; on fakes."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from actors.scorers import make_scorers
from rl_cluster.config.reading.load import parse_config
from rl_cluster.config.reward import RewardConfig
from rl_cluster.data.stream import PromptStream
from rl_cluster.errors import EpisodeError, ScorerError
from rl_cluster.loop.dispatch import RolloutPool
from rl_cluster.loop.evaluation import Evaluator
from rl_cluster.loop.loop import TrainingLoop, Workers
from rl_cluster.loop.producer import Scoring
from rl_cluster.rewards.episode_scorer import EpisodeScorer, episode_scores
from rl_cluster.rewards.failures import FailurePolicy
from rl_cluster.rewards.local_scorers import make_local_scorers
from rl_cluster.trajectory import SamplingSpec, TrajectoryGroup
from tests.fakes import FakeLearner, FakePublisher, FakeRolloutWorker, RecordingObserver, make_prompts


class InEnvironment(FakeRolloutWorker):
    """Pays 2 per one drawn; the groups of `broken` fail so many times before they are played."""

    def __init__(self, broken=None):
        super().__init__()
        self.broken = dict(broken or {})

    async def rollout(self, task):
        if self.broken.get(task.group_id, 0) > 0:
            self.broken[task.group_id] -= 1
            self.tasks.append(task)
            raise EpisodeError("raised", "step: KeyError: 'door'", "Traceback: the door")
        summary, group = await super().rollout(task)
        return summary, TrajectoryGroup(group.group_id, group.prompt, tuple(map(paid, group.trajectories)))


def paid(trajectory):
    ones = float(trajectory.tokens[trajectory.action_mask].sum())
    return replace(trajectory, reward=2 * ones, components={"ones": ones})


def run_loop(folder, worker, rewards=None, steps=4, every=0):
    config = parse_config(
        {
            "run": {"steps": steps},
            "model": {"path": "unused"},
            "data": {"train": {"source": "addition"}},
            "rewards": {"scorers": [{"kind": "environment", "weight": 0.5}], **(rewards or {})},
            "batch": {"prompts_per_step": 4, "samples_per_prompt": 8},
            "eval": {"every": every},
        }
    )
    learner, observer = FakeLearner(), RecordingObserver()
    pool = RolloutPool([worker], 60.0)
    scorers = make_local_scorers(config.rewards, None)
    scoring = Scoring(scorers, FailurePolicy.from_config(config.rewards))
    prompts = make_prompts(7)
    evaluator = Evaluator(prompts[:3], SamplingSpec(1.0, 3), config.eval, 0, pool, scoring)
    workers = Workers(pool, scoring, learner, FakePublisher(learner, [worker]), reference=None)
    loop = TrainingLoop(config, workers, PromptStream(prompts, seed=0), evaluator, observer, folder, None)
    asyncio.run(loop.run())
    return loop, learner, observer


def test_what_the_environment_pays_is_the_score_and_its_metrics_are_logged(tmp_path):
    loop, _, observer = run_loop(tmp_path, InEnvironment(), steps=15)
    row = observer.rows[1]
    assert row["rewards/environment"] == pytest.approx(2 * row["rewards/environment/ones"])
    assert row["objective/scores"] == pytest.approx(row["rewards/environment/ones"])
    assert observer.rows[15]["rewards/environment/ones"] > row["rewards/environment/ones"] + 0.8
    assert observer.rows[15]["eval/score_mean"] > observer.rows[0]["eval/score_mean"] + 0.8
    assert loop.ledger.counts() == {"trained": 60}


def test_a_group_whose_environment_fails_is_played_again_with_the_same_seeds(tmp_path):
    worker = InEnvironment({2: 2})
    loop, learner, _ = run_loop(tmp_path, worker)
    assert loop.ledger.counts() == {"trained": 16}
    attempts = [task for task in worker.tasks if task.group_id == 2]
    assert len(attempts) == 3
    assert len({task.seeds for task in attempts}) == 1
    untroubled = run_loop(tmp_path / "again", InEnvironment())[1]
    assert learner.weight == untroubled.weight


@pytest.mark.parametrize(("rewards", "attempts"), [({}, 3), ({"on_failure": "drop"}, 1)])
def test_after_the_last_attempt_it_is_dropped_and_counted_and_never_trained(tmp_path, rewards, attempts):
    worker = InEnvironment({2: 99})
    loop, learner, _ = run_loop(tmp_path, worker, rewards)
    assert sum(task.group_id == 2 for task in worker.tasks) == attempts
    assert 2 not in learner.trained_groups
    assert len(set(learner.trained_groups)) == 16
    assert loop.ledger.counts() == {"trained": 16, "dropped": 1}


def test_an_environment_that_always_fails_stops_the_run_with_its_traceback(tmp_path):
    with pytest.raises(ScorerError, match=r"(?s)environment.*raised: step: KeyError.*Traceback: the door"):
        run_loop(tmp_path, InEnvironment(dict.fromkeys(range(100), 99)))


def test_an_evaluation_with_holes_is_refused(tmp_path):
    with pytest.raises(ScorerError, match=r"(?s)raised during evaluation: step: KeyError.*the door"):
        run_loop(tmp_path, InEnvironment({-1: 99}))


def test_scores_are_the_rewards_and_the_components_that_all_samples_have(make_group):
    group = make_group("1+1=", ["2", "3", "4"])
    facts = [(1.0, {"a": 1.0, "b": 5.0}), (-2.0, {"a": 2.0}), (0.5, {"b": 1.0, "a": 3.0})]
    samples = [
        replace(t, reward=r, components=c) for t, (r, c) in zip(group.trajectories, facts, strict=True)
    ]
    scores = episode_scores("environment", replace(group, trajectories=tuple(samples)))
    assert scores.values.tolist() == [1.0, -2.0, 0.5]
    assert {name: values.tolist() for name, values in scores.components.items()} == {"a": [1.0, 2.0, 3.0]}
    assert scores.values.dtype == np.float64


def test_a_group_that_no_environment_played_is_a_failure_and_not_0(make_group):
    failure = episode_scores("environment", make_group("1+1=", ["2", "3"]))
    assert (failure.kind, failure.name) == ("raised", "environment")


def test_the_scorer_needs_no_worker_of_its_own():
    rewards = RewardConfig.model_validate(
        {"scorers": [{"kind": "environment", "name": "game", "weight": 2.0}]}, strict=False
    )
    (local,) = make_local_scorers(rewards, None)
    assert isinstance(local, EpisodeScorer)
    (remote,) = make_scorers(rewards, None)
    assert type(remote).__name__ == "DriverScorer"
    assert {(s.name, s.weight) for s in (local, remote)} == {("game", 2.0)}
