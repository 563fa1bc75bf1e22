"""An episode in which an environment answers: a prompt, a seed and an environment in, a Trajectory out.

A step of generation is a whole response, or one token where the environment has `wants_tokens`. What the
environment shows after a step must begin with exactly the tokens so far; what it adds is observed, not drawn
(action False), and the next step generates from all of it. Nothing is ever tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from actors.transcript import Decoder, Generator, Transcript, turn_seed
from rl_cluster.errors import BadInputError
from rl_cluster.trajectory import FinishReason, Prompt, SamplingSpec, Trajectory

if TYPE_CHECKING:  # it imports torch, which the driver does without
    from rl_cluster.environments.playing.hosting import HostedEnvironment, StepFacts

START = -1
"""The turn whose seed the environment's start gets."""


@dataclass(frozen=True)
class EpisodeLimits:
    """max_turns: responses. max_tokens: of the whole episode, prompt included."""

    max_turns: int
    max_tokens: int


@dataclass
class _Earned:
    """What the environment has paid so far, and its last metrics."""

    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)

    def add(self, facts: StepFacts) -> None:
        self.reward += facts.reward
        self.components |= facts.metrics


async def play_in(
    environment: HostedEnvironment,
    generator: Generator,
    decoder: Decoder,
    eos_token_ids: frozenset[int],
    prompt: Prompt,
    seed: int,
    start_seed: int,
    sampling: SamplingSpec,
    limits: EpisodeLimits,
) -> Trajectory:
    """One episode. It ends when the environment says done, when the policy has ended its response and the
    environment shows nothing new, or at a limit; in the last two cases `truncate` lets the environment pay.

    Raises EpisodeError for what the environment raises, BadInputError for observations that do not fit.
    """
    transcript = Transcript(tokens=[])
    transcript.observe(prompt.tokens.tolist())
    shown = await environment.start(prompt, start_seed)
    transcript.observe(added_tokens(transcript.tokens, shown, turn=0))
    earned = _Earned()
    finish = await _play_turns(environment, generator, decoder, transcript, earned, seed, sampling, limits)
    ends = sampling.ends(eos_token_ids)
    return transcript.trajectory(
        decoder, len(prompt.tokens), ends, finish, reward=earned.reward, components=earned.components
    )


async def _play_turns(
    environment: HostedEnvironment,
    generator: Generator,
    decoder: Decoder,
    transcript: Transcript,
    earned: _Earned,
    seed: int,
    sampling: SamplingSpec,
    limits: EpisodeLimits,
) -> FinishReason:
    """Add to transcript and earned until the episode is over; why it is."""
    largest = 1 if environment.wants_tokens else sampling.max_new_tokens
    turn, step, response_begins = 1, 0, len(transcript.tokens)
    finish: FinishReason = "length"
    while (room := limits.max_tokens - len(transcript.tokens)) > 0:
        now = replace(sampling, max_new_tokens=min(largest, room))
        drawn = await generator.generate(list(transcript.tokens), turn_seed(seed, step), now)
        facts = await environment.step(drawn.tokens.tolist())
        earned.add(facts)
        transcript.act(drawn, facts.taken, has_stops=bool(sampling.stop))
        if facts.done:
            return facts.finish_reason
        assert facts.shown is not None, "an episode that goes on has an observation"
        added = added_tokens(transcript.tokens, facts.shown, turn)
        response = transcript.tokens[response_begins:]
        if not added and (drawn.finish_reason == "stop" or _has_stop(decoder, response, sampling.stop)):
            finish, transcript.ended = "stop", True
            break
        if added and (turn == limits.max_turns or len(added) >= room - len(drawn.tokens)):
            break
        if added:
            transcript.observe(added)
            turn, response_begins = turn + 1, len(transcript.tokens)
        step += 1
    last = await environment.truncate()
    if last is not None:
        earned.add(last)
    return finish


def _has_stop(decoder: Decoder, response: Sequence[int], stop: Sequence[str]) -> bool:
    """The engine looks for stop strings in what it drew in one go, which token by token is a single token."""
    return bool(stop) and any(text in decoder.decode(response, skip_special_tokens=False) for text in stop)


def added_tokens(tokens: Sequence[int], shown: Sequence[int], turn: int) -> list[int]:
    """What an observation adds to the tokens so far; BadInputError, with turn and place, if it changes them.

    turn: 0 for the observation that the episode starts with, 1 for the one after the first response.
    """
    if list(shown[: len(tokens)]) == list(tokens):
        return list(shown[len(tokens) :])
    pairs = enumerate(zip(tokens, shown, strict=False))
    place = next((i for i, (ours, theirs) in pairs if ours != theirs), len(shown))
    told = f"token {shown[place]}" if place < len(shown) else "nothing"
    remedy = (
        "Its first observation must begin with the tokens of the run's prompt: train on the environment's "
        "own prompts, or give it start(prompt, metadata, seed)."
        if turn == 0
        else "An observation must repeat prompt, actions and earlier observations as they were, and add to "
        "them: keep tokens, do not tokenise text again."
    )
    raise BadInputError(
        f"rollout.environment: the observation of turn {turn} breaks the tokens so far at place {place} of "
        f"{len(tokens)}: it has {told} where token {tokens[place]} was. {remedy}"
    )
