"""TRL's loop on the caller's tensors: token ids and scores in; samples, steps of the run and stats out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_cluster.data.encode import special_tokens
from rl_cluster.errors import BadInputError
from rl_cluster.loop.loop import train_sampling
from rl_cluster.modeling.end_tokens import end_token_ids
from rl_cluster.trainers.ppo.history import step_stats
from rl_cluster.trainers.ppo.run import PPORun
from rl_cluster.trainers.ppo.tensors import (
    brought_group,
    padded,
    prompt_ids,
    query_prompt,
    response_ids,
    sampling_of,
    score_column,
    token_rows,
)
from rl_cluster.trainers.session import TrainerSession
from rl_cluster.trajectory import Prompt, SamplingSpec, TrajectoryGroup


class TensorLoop:
    """Remembers what the last `generate` drew, so that `step` trains on it with its own log-probabilities."""

    def __init__(self, run: PPORun, open_run: Callable[[Sequence[Prompt]], TrainerSession]) -> None:
        """open_run: starts the workers where they are not up yet."""
        self._run = run
        self._open = open_run
        self._drawn: dict[tuple[int, ...], tuple[TrajectoryGroup, SamplingSpec]] = {}
        self._ends: frozenset[int] | None = None

    def texts(self, prompts: Sequence[Prompt], kwargs: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """One response each, as PPOTrainer.generate_responses. kwargs: transformers' generation_kwargs."""
        groups, _ = self._sample(prompts, kwargs)
        responses = [response_ids(group) for group in groups]
        queries = [prompt_ids(group) for group in groups]
        sequences = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
        pad = special_tokens(self._run.tokenizer).pad
        outputs = {"sequences": padded(sequences, pad), "response_ids": responses, "prompt_ids": queries}
        return [group.trajectories[0].response_text for group in groups], outputs

    def generate(
        self, queries: Any, kwargs: Mapping[str, Any], return_prompt: bool = False
    ) -> list[torch.Tensor]:
        """Responses to token ids, remembered; behind their prompts if need be."""
        groups, sampling = self._sample(self._prompts("generate: query_tensors", queries), kwargs)
        responses = [response_ids(group) for group in groups]
        keys = [_key(group.prompt, ids.tolist()) for group, ids in zip(groups, responses, strict=True)]
        self._drawn = {key: (group, sampling) for key, group in zip(keys, groups, strict=True)}
        if return_prompt:
            return [torch.cat([prompt_ids(g), r]) for g, r in zip(groups, responses, strict=True)]
        return responses

    def step(self, queries: Any, responses: Any, scores: Any) -> dict[str, float | None]:
        """As PPOTrainer.step."""
        prompts = self._prompts("step: queries", queries)
        rows = token_rows("step: responses", responses, len(self._run.tokenizer))
        if len(rows) != len(prompts):
            raise BadInputError(
                f"step: {len(rows)} responses for {len(prompts)} queries; give one response each."
            )
        values = score_column(scores, len(rows))
        session = self._open(prompts)
        groups = [self._group(session, i, *pair) for i, pair in enumerate(zip(prompts, rows, strict=True))]
        columns = [np.array([value]) for value in values]
        metrics = session.background.call(session.run.train_on(groups, columns))
        self._run.take_weights()
        return step_stats(metrics, self._run.config.value_coef)

    def _prompts(self, field: str, queries: Any) -> tuple[Prompt, ...]:
        run = self._run
        rows = token_rows(field, queries, len(run.tokenizer))
        return tuple(
            query_prompt(f"{field}[{i}]", row, run.tokenizer, run.prompt_limit) for i, row in enumerate(rows)
        )

    def _sample(
        self, prompts: Sequence[Prompt], kwargs: Mapping[str, Any]
    ) -> tuple[list[TrajectoryGroup], SamplingSpec]:
        """Where kwargs say nothing: as in training."""
        session = self._open(prompts)
        sampling = sampling_of(kwargs, train_sampling(session.config))
        room = session.run.plan.derived.max_sequence_tokens
        for prompt in prompts:
            total = len(prompt.tokens) + sampling.max_new_tokens
            if total > room:
                raise BadInputError(
                    f"max_new_tokens={sampling.max_new_tokens}: with {prompt.prompt_id} it makes {total}, "
                    f"and the run has room for {room} tokens (PPOConfig.max_prompt_length + max_new_tokens)."
                )
        return session.background.call(session.run.generate(prompts, 1, sampling)), sampling

    def _end_ids(self, session: TrainerSession) -> frozenset[int]:
        """All that may end a response: the model's own end tokens and the run's stop tokens."""
        if self._ends is None:
            model = session.config.model.path
            assert model is not None
            own = end_token_ids(model, self._run.tokenizer)
            self._ends = own.union(session.config.rollout.stop_token_ids)
        return self._ends

    def _group(
        self, session: TrainerSession, index: int, prompt: Prompt, response: list[int]
    ) -> TrajectoryGroup:
        room, total = session.run.plan.derived.max_sequence_tokens, len(prompt.tokens) + len(response)
        if total > room:
            raise BadInputError(
                f"step: query and response {index} have {total} tokens together, more than the {room} of "
                "PPOConfig.max_prompt_length + max_new_tokens."
            )
        known = self._drawn.get(_key(prompt, response))
        if known is None:
            tokenizer, stop = self._run.tokenizer, session.config.rollout.stop
            ends = self._end_ids(session)
            return brought_group(index, prompt, response, session.run.step, tokenizer, ends, stop)
        group, sampling = known
        temperature = train_sampling(session.config).temperature
        if sampling.top_p < 1 or sampling.top_k > 0 or sampling.temperature != temperature:
            raise BadInputError(
                f"step: response {index} was generated with temperature={sampling.temperature:g}, top_p="
                f"{sampling.top_p:g}, top_k={sampling.top_k}. PPO's ratios need the whole distribution at "
                f"PPOConfig.temperature={temperature:g}: generate with that, top_p=1 and top_k=0."
            )
        return group


def _key(prompt: Prompt, response: Sequence[int]) -> tuple[int, ...]:
    return (*prompt.tokens.tolist(), -1, *response)
