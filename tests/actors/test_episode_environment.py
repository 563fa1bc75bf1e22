"""Episodes in environments, on a generator that plays from a list: every token, mask and reward by hand."""

import asyncio
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from actors.episode import play_group
from actors.transcript import turn_seed
from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.environments import Observation, RLEnvironment, StepResult
from rl_cluster.environments.playing.hosting import EnvironmentPool
from rl_cluster.errors import BadInputError, EpisodeError
from rl_cluster.trajectory import GroupTask, Prompt, SamplingSpec

EOS = 9
PROMPT = [3, 4]


@dataclass
class Drawn:
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str


class Script:
    """Draws fixed responses; token t has log-probability -t/10 and the number of earlier calls as version."""

    def __init__(self, *responses):
        self.responses = responses
        self.calls = []

    async def generate(self, prompt, seed, sampling):
        self.calls.append((list(prompt), seed, sampling.max_new_tokens))
        left = self._left(prompt)[: sampling.max_new_tokens]
        if EOS in left:
            left = left[: left.index(EOS) + 1]
        tokens = np.array(left, dtype=np.int32)
        stopped = left[-1] == EOS
        versions = np.full(len(left), len(self.calls) - 1, dtype=np.int32)
        return Drawn(tokens, -tokens.astype(np.float32) / 10, versions, "stop" if stopped else "length")

    def _left(self, prompt):
        """The rest of the response that is begun, known by the observation (above 90) or prompt before it."""
        since = max((i for i, token in enumerate(prompt) if token in PROMPT or token > 90), default=0)
        turn = sum(token > 90 for token in prompt)
        return self.responses[turn][len(prompt) - since - 1 :]


class Text:
    def decode(self, token_ids, skip_special_tokens):
        return " ".join(str(t) for t in token_ids if not (skip_special_tokens and t == EOS))


class Counting(RLEnvironment):
    """Answers each ended response with token 91, 92, …; pays its number of tokens; done after `turns`."""

    def __init__(self, turns=2):
        self.turns = turns

    def reset(self):
        self.tokens, self.response, self.turn = list(PROMPT), 0, 0
        return self._show()

    def step(self, action):
        self.tokens += action.tolist()
        self.response += len(action)
        if self.tokens[-1] != EOS:
            return StepResult(0.0, False, self._show(), metrics={"open": 1.0})
        paid, self.response = float(self.response), 0
        self.turn += 1
        if self.turn == self.turns:
            return StepResult(paid, True, metrics={"reward_turns": self.turn, "last": paid})
        self.tokens.append(90 + self.turn)
        return StepResult(paid, False, self._show(), metrics={"first": paid, "last": paid})

    def _show(self):
        return Observation([list(self.tokens)], [[1] * len(self.tokens)], "p")


class CountingTokens(Counting):
    wants_tokens = True


def play(generator, factory, num_samples=1, max_new_tokens=8, max_sequence_tokens=None, stop=(), **settings):
    """The trajectories of one group."""
    prompt = Prompt("row 0", np.array(PROMPT, dtype=np.int32), "p")
    seeds = tuple(range(50, 50 + num_samples))
    task = GroupTask(0, prompt, seeds, SamplingSpec(1.0, max_new_tokens, stop=stop))

    async def run():
        config = EnvironmentConfig(**{"max_episode_tokens": 20, "timeout_seconds": 5.0} | settings)
        pool = EnvironmentPool(factory, "tokenizer", config)
        try:
            return await play_group(generator, Text(), frozenset([EOS]), task, pool, max_sequence_tokens)
        finally:
            pool.close()

    return asyncio.run(run()).trajectories


def test_an_environments_answer_is_observed_and_the_next_turn_goes_on_from_it():
    script = Script([5, 6, EOS], [7, EOS])
    (trajectory,) = play(script, lambda _: Counting())
    assert trajectory.tokens.tolist() == [3, 4, 5, 6, 9, 91, 7, 9]
    assert trajectory.action_mask.tolist() == [False, False, True, True, True, False, True, True]
    np.testing.assert_allclose(
        trajectory.behaviour_logprobs, [0, 0, -0.5, -0.6, -0.9, 0, -0.7, -0.9], atol=1e-6
    )
    assert trajectory.policy_versions.tolist() == [-1, -1, 0, 0, 0, -1, 1, 1]
    assert (trajectory.reward, dict(trajectory.components)) == (
        5.0,
        {"first": 3.0, "last": 2.0, "turns": 2.0},
    )
    assert (trajectory.finish_reason, trajectory.ended_with_eos) == ("stop", True)
    assert trajectory.response_text == "5 6 91 7"
    assert script.calls == [([3, 4], 50, 8), ([3, 4, 5, 6, 9, 91], turn_seed(50, 1), 8)]


def test_token_by_token_gives_the_same_episode_as_whole_responses():
    responses = [5, 6, EOS], [7, EOS]
    (whole,) = play(Script(*responses), lambda _: Counting())
    script = Script(*responses)
    (tokens,) = play(script, lambda _: CountingTokens())
    for column in ("tokens", "action_mask", "behaviour_logprobs"):
        assert getattr(tokens, column).tolist() == getattr(whole, column).tolist()
    assert (tokens.reward, tokens.finish_reason) == (whole.reward, whole.finish_reason)
    assert [limit for _, _, limit in script.calls] == [1] * 5
    assert [seed for _, seed, _ in script.calls] == [turn_seed(50, step) for step in range(5)]


def test_a_token_level_environment_stops_after_any_token():
    class StopAtSix(Counting):
        wants_tokens = True

        def step(self, action):
            (token,) = action.tolist()
            if token == 6:
                return StepResult(1.5, True)
            return super().step(action)

    (trajectory,) = play(Script([5, 6, 7, 8]), lambda _: StopAtSix())
    assert trajectory.tokens.tolist() == [3, 4, 5, 6]
    assert (trajectory.reward, trajectory.finish_reason, trajectory.ended_with_eos) == (1.5, "stop", False)


def test_tokens_after_the_end_of_an_episode_are_not_part_of_it():
    class TakesTwo(Counting):
        def step(self, action):
            return StepResult(1.0, True, info={"tokens_taken": 2, "finish_reason": "length"})

    (trajectory,) = play(Script([5, 6, 7, 8]), lambda _: TakesTwo(), max_new_tokens=4)
    assert trajectory.tokens.tolist() == [3, 4, 5, 6]
    assert trajectory.behaviour_logprobs[2:].tolist() == pytest.approx([-0.5, -0.6])
    assert trajectory.finish_reason == "length"


class Paying(Counting):
    """Pays 10 when the run ends the episode."""

    def truncate(self):
        return StepResult(10.0, True, metrics={"cut": 1.0})


@pytest.mark.parametrize(
    ("limits", "tokens", "reward"),
    [
        ({"max_turns": 1}, [3, 4, 5, 6, 9], 3 + 10),
        ({"max_turns": 2}, [3, 4, 5, 6, 9, 91, 7, 9], 5 + 10),
        # 5 tokens after the prompt: the observation 91 leaves room for one more
        ({"max_episode_tokens": 5}, [3, 4, 5, 6, 9, 91, 7], 3 + 10),
        # 4: it would leave none, and is not added
        ({"max_episode_tokens": 4}, [3, 4, 5, 6, 9], 3 + 10),
        ({"max_episode_tokens": 2}, [3, 4, 5, 6], 0 + 10),
        ({"max_sequence_tokens": 4}, [3, 4, 5, 6], 0 + 10),
        # a response of at most 2 tokens is continued where the environment asks for more
        ({"max_new_tokens": 2, "max_turns": 1}, [3, 4, 5, 6, 9], 3 + 10),
        ({"max_new_tokens": 2, "max_episode_tokens": None}, [3, 4, 5, 6], 0 + 10),
    ],
)
@pytest.mark.parametrize("wants_tokens", [False, True])
def test_limits_end_an_episode_and_the_environment_pays_what_is_due(limits, tokens, reward, wants_tokens):
    def factory(_):
        environment = Paying(turns=3)
        environment.wants_tokens = wants_tokens
        return environment

    (trajectory,) = play(Script([5, 6, EOS], [7, EOS], [8, EOS]), factory, **limits)
    assert trajectory.tokens.tolist() == tokens
    assert (trajectory.reward, trajectory.finish_reason) == (reward, "length")
    assert trajectory.components["cut"] == 1.0


@pytest.mark.parametrize("wants_tokens", [False, True])
def test_an_episode_ends_when_policy_and_environment_have_nothing_more_to_say(wants_tokens):
    class Silent(Paying):
        def step(self, action):
            self.tokens += action.tolist()
            return StepResult(1.0, False, self._show())

    def factory(_):
        environment = Silent()
        environment.wants_tokens = wants_tokens
        return environment

    (trajectory,) = play(Script([5, 6, EOS]), factory)
    assert (trajectory.tokens.tolist(), trajectory.finish_reason) == ([3, 4, 5, 6, 9], "stop")
    assert trajectory.reward == (13.0 if wants_tokens else 11.0)


def test_stop_strings_are_found_across_the_tokens_of_a_token_level_episode():
    class Silent(CountingTokens):
        def step(self, action):
            self.tokens += action.tolist()
            return StepResult(1.0, False, self._show())

    (trajectory,) = play(Script([5, 6, 7, 8]), lambda _: Silent(), stop=("6 7",))
    assert (trajectory.tokens.tolist(), trajectory.finish_reason) == ([3, 4, 5, 6, 7], "stop")


def test_what_an_environment_says_is_not_taken_for_a_stop_string():
    (trajectory,) = play(Script([5, EOS], [7, 8, EOS]), lambda _: CountingTokens(), stop=("91", "5"))
    assert trajectory.tokens.tolist() == [3, 4, 5]
    (trajectory,) = play(Script([5, EOS], [7, 8, EOS]), lambda _: CountingTokens(), stop=("91",))
    assert trajectory.tokens.tolist() == [3, 4, 5, 9, 91, 7, 8, 9]


def test_a_broken_prefix_names_the_turn_and_the_place():
    class Retokenising(Counting):
        def _show(self):
            shown = list(self.tokens)
            if len(shown) > 5:
                shown[3] = 77
            return Observation([shown], [[1] * len(shown)], "p")

    with pytest.raises(BadInputError, match=r"turn 1 .* place 3 of 5: it has token 77 where token 6 was"):
        play(Script([5, 6, EOS], [7, EOS]), lambda _: Retokenising())


def test_an_environment_that_starts_elsewhere_than_the_runs_prompt_is_refused():
    class Elsewhere(Counting):
        def reset(self):
            super().reset()
            self.tokens = [3, 5]
            return self._show()

    with pytest.raises(BadInputError, match=r"turn 0 .* place 1 of 2: it has token 5 where token 4 was"):
        play(Script([5, EOS]), lambda _: Elsewhere())


def test_what_the_first_observation_adds_to_the_prompt_is_observed():
    class Greeting(Counting):
        def reset(self):
            super().reset()
            self.tokens.append(91)
            return self._show()

    (trajectory,) = play(Script([], [5, EOS]), lambda _: Greeting(turns=1))
    assert trajectory.tokens.tolist() == [3, 4, 91, 5, 9]
    assert trajectory.action_mask.tolist() == [False, False, False, True, True]


def test_samples_of_a_group_start_alike_and_draw_with_their_own_seeds():
    starts = []

    class Started(Counting):
        def start(self, prompt, metadata, seed):
            starts.append((prompt, metadata, seed))
            return self.reset()

    script = Script([5, EOS], [6, EOS])
    play(script, lambda _: Started(), num_samples=3)
    assert starts == [("p", {}, turn_seed(50, -1))] * 3
    assert sorted(seed for tokens, seed, _ in script.calls if tokens == PROMPT) == [50, 51, 52]


def test_environments_are_never_shared_and_are_used_again():
    made = []

    def factory(tokenizer):
        made.append((tokenizer, threading.current_thread()))
        return Counting()

    async def run():
        pool = EnvironmentPool(factory, "tokenizer", EnvironmentConfig())
        await pool.prepare()
        prompt = Prompt("row 0", np.array(PROMPT, dtype=np.int32), "p")
        for group in range(3):
            task = GroupTask(group, prompt, (1, 2, 3, 4), SamplingSpec(1.0, 8))
            await play_group(Script([5, EOS], [6, EOS]), Text(), frozenset([EOS]), task, pool)
        pool.close()

    asyncio.run(run())
    assert len(made) == 4
    assert {tokenizer for tokenizer, _ in made} == {"tokenizer"}
    assert len({thread for _, thread in made} | {threading.current_thread()}) == 5


def failing(error):
    class Failing(Counting):
        def step(self, action):
            raise error

    return Failing


def test_an_environment_that_raises_is_a_typed_failure_with_its_own_traceback():
    with pytest.raises(EpisodeError) as caught:
        play(Script([5, EOS]), lambda _: failing(KeyError("door"))(), num_samples=3)
    kind, message, trace = caught.value.args
    assert (kind, message) == ("raised", "step: KeyError: 'door'")
    assert "in step\n" in trace
    assert "raise error" in trace


@pytest.mark.parametrize("error", [StopIteration("end"), SystemExit(3)])
def test_even_what_a_future_cannot_carry_is_heard_of(error):
    with pytest.raises(EpisodeError, match=f"step: RuntimeError: {type(error).__name__}"):
        play(Script([5, EOS]), lambda _: failing(error)())


def test_an_environment_that_hangs_does_not_hold_up_the_others():
    release = threading.Event()

    class Hanging(Counting):
        def step(self, action):
            release.wait(30)
            return super().step(action)

    try:
        with pytest.raises(EpisodeError, match=r"timeout: step took longer than .*timeout_seconds=0\.05"):
            play(Script([5, EOS]), lambda _: Hanging(), timeout_seconds=0.05)
    finally:
        release.set()


def test_an_environments_own_timeout_error_is_not_taken_for_ours():
    with pytest.raises(EpisodeError, match="raised: step: TimeoutError: socket"):
        play(Script([5, EOS]), lambda _: failing(TimeoutError("socket"))())


@pytest.mark.parametrize("reward", [float("nan"), None, "much", float("inf")])
def test_a_reward_that_is_no_number_is_a_failure_and_never_0(reward):
    class Odd(Counting):
        def step(self, action):
            return StepResult(reward, True)

    with pytest.raises(EpisodeError, match="not_finite: reward is"):
        play(Script([5, EOS]), lambda _: Odd())


def test_an_environment_that_failed_is_not_used_again():
    made = []

    def factory(_):
        made.append(failing(ValueError("once"))() if not made else Counting(turns=1))
        return made[-1]

    async def run():
        pool = EnvironmentPool(factory, None, EnvironmentConfig())
        task = GroupTask(0, Prompt("row", np.array(PROMPT, dtype=np.int32), "p"), (1,), SamplingSpec(1.0, 8))
        with pytest.raises(EpisodeError):
            await play_group(Script([5, EOS]), Text(), frozenset([EOS]), task, pool)
        return await play_group(Script([5, EOS]), Text(), frozenset([EOS]), task, pool)

    assert asyncio.run(run()).trajectories[0].reward == 2.0
    assert len(made) == 2


class Nothing:
    """Neither reset nor step."""


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda _: Nothing(), r"returned Nothing without reset\(\)"),
        (lambda tokenizer: tokenizer.vocabulary, "making the environment: AttributeError"),
    ],
)
def test_a_factory_that_makes_no_environment_is_refused_before_training(factory, message):
    async def prepare():
        await EnvironmentPool(factory, "tokenizer", EnvironmentConfig()).prepare()

    with pytest.raises(BadInputError, match=message):
        asyncio.run(prepare())


def test_a_step_without_observation_that_is_not_done_is_refused():
    class Mute(Counting):
        def step(self, action):
            return StepResult(0.0, False)

    with pytest.raises(BadInputError, match="no next_observation"):
        play(Script([5, EOS]), lambda _: Mute())
