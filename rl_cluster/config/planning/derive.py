"""What follows from the three batch-size knobs: a RunConfig in, the derived counts out."""

from __future__ import annotations

from dataclasses import dataclass

from rl_cluster.config.data import AdditionSource
from rl_cluster.config.planning.model_shape import ModelShape
from rl_cluster.config.run import RunConfig


@dataclass(frozen=True)
class Derived:
    """Counts. Tokens are upper limits: prompts and responses are rarely all of the greatest length.

    step: one batch. update: one change of the weights; a step takes epochs × mini-batches of them.
    """

    groups_per_step: int
    sequences_per_step: int
    updates_per_step: int
    sequences_per_update: int
    total_updates: int
    total_sequences: int
    max_prompt_tokens: int
    max_sequence_tokens: int
    max_generated_tokens_per_step: int
    max_tokens_per_step: int
    micro_batch_tokens: int
    max_micro_batches_per_update: int


def derive(config: RunConfig, shape: ModelShape | None) -> Derived:
    """max_micro_batches_per_update is that of one learner rank."""
    batch, algorithm = config.batch, config.algorithm
    sequences = batch.prompts_per_step * batch.samples_per_prompt
    updates = algorithm.num_epochs * algorithm.num_mini_batches
    prompt = max_prompt_tokens(config)
    longest = prompt + max(max_episode_tokens(config), config.eval.max_new_tokens or 0)
    if shape is not None and shape.max_positions is not None:
        longest = min(longest, shape.max_positions)
    trained_length = min(longest, prompt + max_episode_tokens(config))
    per_update = sequences // algorithm.num_mini_batches
    per_rank = -(-per_update // config.learner.num_ranks)
    rows_per_micro_batch = max(1, batch.tokens_per_micro_batch // trained_length)
    return Derived(
        groups_per_step=batch.prompts_per_step,
        sequences_per_step=sequences,
        updates_per_step=updates,
        sequences_per_update=per_update,
        total_updates=config.run.max_updates or config.run.steps * updates,
        total_sequences=config.run.steps * sequences,
        max_prompt_tokens=prompt,
        max_sequence_tokens=longest,
        max_generated_tokens_per_step=sequences * max_episode_tokens(config),
        max_tokens_per_step=sequences * trained_length,
        micro_batch_tokens=min(max(batch.tokens_per_micro_batch, trained_length), per_rank * trained_length),
        max_micro_batches_per_update=-(-per_rank // rows_per_micro_batch),
    )


def max_episode_tokens(config: RunConfig) -> int:
    """Of one trained sequence after its prompt."""
    environment = config.rollout.environment
    of_environment = None if environment is None else environment.max_episode_tokens
    return of_environment or config.rollout.max_new_tokens


def max_prompt_tokens(config: RunConfig) -> int:
    """data.max_prompt_tokens, or less where the prompts are generated one token per character."""
    source = config.data.train
    if config.model.scratch is not None and isinstance(source, AdditionSource):
        number = "9" * source.num_digits
        longest = len(source.template.replace("{a}", number).replace("{b}", number))
        return min(config.data.max_prompt_tokens, longest)
    return config.data.max_prompt_tokens
