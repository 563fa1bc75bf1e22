"""Episodes: a GroupTask in, its TrajectoryGroup out; a prompt and a seed in, a Trajectory out.

Without an environment an episode is one response. With one, see environment_episode.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from actors.environment_episode import START, EpisodeLimits, play_in
from actors.transcript import Decoder, Drawn, Generator, Transcript, turn_seed
from rl_cluster.trajectory import GroupTask, Prompt, SamplingSpec, Trajectory, TrajectoryGroup

if TYPE_CHECKING:  # it imports torch, which the driver does without
    from rl_cluster.environments.playing.hosting import EnvironmentPool

__all__ = ["Decoder", "Drawn", "Generator", "Transcript", "play", "play_group", "turn_seed"]


async def play_group(
    generator: Generator,
    decoder: Decoder,
    eos_token_ids: frozenset[int],
    task: GroupTask,
    environments: EnvironmentPool | None = None,
    max_sequence_tokens: int | None = None,
) -> TrajectoryGroup:
    """The task's episodes at once, each with its own seed; if one fails, the others end with it.

    environments: what answers, if anything does. max_sequence_tokens: the most that the generator takes,
    prompt and response together; only an environment's episodes can outgrow it.
    """
    episodes: list[Coroutine[Any, Any, Trajectory]]
    if environments is None:
        episodes = [
            play(generator, decoder, eos_token_ids, task.prompt, seed, task.sampling) for seed in task.seeds
        ]
    else:
        limits = episode_limits(environments, task, max_sequence_tokens)
        episodes = [
            _play_borrowed(environments, generator, decoder, eos_token_ids, task, seed, limits)
            for seed in task.seeds
        ]
    return TrajectoryGroup(task.group_id, task.prompt, tuple(await _all_or_none(episodes)))


def episode_limits(
    environments: EnvironmentPool, task: GroupTask, max_sequence_tokens: int | None
) -> EpisodeLimits:
    settings = environments.settings
    longest = len(task.prompt.tokens) + (settings.max_episode_tokens or task.sampling.max_new_tokens)
    return EpisodeLimits(settings.max_turns, min(longest, max_sequence_tokens or longest))


async def _play_borrowed(
    environments: EnvironmentPool,
    generator: Generator,
    decoder: Decoder,
    eos_token_ids: frozenset[int],
    task: GroupTask,
    seed: int,
    limits: EpisodeLimits,
) -> Trajectory:
    start_seed = turn_seed(task.seeds[0], START)
    async with environments.borrow() as environment:
        return await play_in(
            environment,
            generator,
            decoder,
            eos_token_ids,
            task.prompt,
            seed,
            start_seed,
            task.sampling,
            limits,
        )


async def _all_or_none(episodes: list[Coroutine[Any, Any, Trajectory]]) -> list[Trajectory]:
    tasks = [asyncio.ensure_future(episode) for episode in episodes]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def play(
    generator: Generator,
    decoder: Decoder,
    eos_token_ids: frozenset[int],
    prompt: Prompt,
    seed: int,
    sampling: SamplingSpec,
) -> Trajectory:
    """One episode of one response."""
    transcript = Transcript(tokens=[])
    transcript.observe(prompt.tokens.tolist())
    drawn = await generator.generate(transcript.tokens, turn_seed(seed, turn=0), sampling)
    transcript.act(drawn, has_stops=bool(sampling.stop))
    ends = sampling.ends(eos_token_ids)
    return transcript.trajectory(decoder, len(prompt.tokens), ends, drawn.finish_reason)
