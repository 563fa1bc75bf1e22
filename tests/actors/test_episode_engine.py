"""Environments on the real engine: token by token draws what whole responses draw; turns keep tokens."""

import numpy as np
import pytest
import pytest_asyncio

from actors.episode import play, play_group
from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.environments import Observation, RLEnvironment, StepResult, TextGenerationEnv
from rl_cluster.environments.playing.for_runs import environment_factory
from rl_cluster.environments.playing.hosting import EnvironmentPool
from rl_cluster.trajectory import GroupTask, Prompt
from tests.actors.publishing import PROMPT, sampling, transformers_logprobs

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack]


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def first_weights(engine, publishing, policy):
    """Tests of other files publish: start from the checkpoint's weights as version 0."""
    await publishing.publish(policy, version=0)


def task(engine, num_samples=1, **spec):
    text = engine.tokenizer.decode(PROMPT)
    prompt = Prompt("row 0", np.array(PROMPT, dtype=np.int32), text, {"prompt_idx": 0})
    return GroupTask(0, prompt, tuple(range(70, 70 + num_samples)), sampling(**spec))


async def trajectories(engine, factory, group_task, **settings):
    pool = EnvironmentPool(factory, engine.tokenizer, EnvironmentConfig(**settings))
    group = await play_group(
        engine, engine.tokenizer, engine.eos_token_ids, group_task, pool, engine.spec.max_model_len - 1
    )
    pool.close()
    return group.trajectories


def text_environment(engine, wants_tokens):
    env = TextGenerationEnv(
        engine.tokenizer,
        [engine.tokenizer.decode(PROMPT)],
        max_length=16,
        reward_fn=lambda prompt, generated, full_text: float(len(generated)),
    )
    env.wants_tokens = wants_tokens
    return environment_factory(env)


async def test_greedy_episodes_are_the_same_with_and_without_environment_whole_and_token_by_token(engine):
    greedy = task(engine, temperature=0.0, max_new_tokens=16)
    plain = await play(
        engine, engine.tokenizer, engine.eos_token_ids, greedy.prompt, greedy.seeds[0], greedy.sampling
    )
    for wants_tokens in (False, True):
        (played,) = await trajectories(engine, text_environment(engine, wants_tokens), greedy)
        assert played.tokens.tolist() == plain.tokens.tolist()
        assert played.action_mask.tolist() == plain.action_mask.tolist()
        assert played.policy_versions.tolist() == plain.policy_versions.tolist()
        np.testing.assert_allclose(played.behaviour_logprobs, plain.behaviour_logprobs, atol=1e-4)
        assert (played.finish_reason, played.ended_with_eos) == (plain.finish_reason, plain.ended_with_eos)
        assert played.reward == len(plain.response_text) > 0


class Dialogue(RLEnvironment):
    """Shows the digits 1, 2, … after each response; pays 1 per turn; three turns."""

    def __init__(self, tokenizer, wants_tokens):
        self.tokenizer, self.wants_tokens = tokenizer, wants_tokens

    def reset(self):
        self.tokens, self.turn, self.drawn = list(PROMPT), 0, 0
        return self.show()

    def step(self, action):
        self.tokens += action.tolist()
        self.drawn += len(action)
        if self.drawn < 5 and action[-1] != self.tokenizer.eos_token_id:
            return StepResult(0.0, False, self.show())
        self.turn, self.drawn = self.turn + 1, 0
        if self.turn == 3:
            return StepResult(1.0, True, metrics={"turns": 3.0})
        self.tokens += self.tokenizer(f"={self.turn}+", add_special_tokens=False)["input_ids"]
        return StepResult(1.0, False, self.show())

    def show(self):
        return Observation([self.tokens.copy()], [[1] * len(self.tokens)], "")


@pytest.mark.parametrize("wants_tokens", [False, True])
async def test_turns_are_masked_exactly_and_their_logprobs_are_those_of_the_whole_sequence(
    engine, policy, wants_tokens
):
    made = lambda tokenizer: Dialogue(tokenizer, wants_tokens)  # noqa: E731
    group_task = task(engine, num_samples=4, max_new_tokens=5)
    played = await trajectories(engine, made, group_task, max_episode_tokens=40)
    assert len({t.tokens.tobytes() for t in played}) > 1
    shown = [engine.tokenizer(f"={turn}+", add_special_tokens=False)["input_ids"] for turn in (1, 2)]
    for trajectory in played:
        tokens, mask = trajectory.tokens, trajectory.action_mask
        observed = tokens[len(PROMPT) :][~mask[len(PROMPT) :]]
        assert observed.tolist() == shown[0] + shown[1]
        runs = np.flatnonzero(np.diff(mask.astype(int))).size
        assert (runs, bool(mask[-1])) == (5, True)
        exact = transformers_logprobs(policy, tokens)[mask[1:]]
        np.testing.assert_allclose(trajectory.behaviour_logprobs[mask], exact, atol=1e-4)
        assert (trajectory.behaviour_logprobs[~mask] == 0).all()
        assert (trajectory.reward, trajectory.components["turns"]) == (3.0, 3.0)
