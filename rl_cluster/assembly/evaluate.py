"""A model scored on its held-out prompts, without a learner: configuration in, metrics out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_cluster.assembly.environment import run_environment
from rl_cluster.assembly.given import Given, check_given
from rl_cluster.assembly.run import make_evaluator
from rl_cluster.assembly.train import load_tokenizer, worker_session
from rl_cluster.config.planning.plan import Plan
from rl_cluster.config.run import RunConfig
from rl_cluster.data.load import PromptSets, load_prompts
from rl_cluster.errors import BadInputError
from rl_cluster.loop.report import Metrics
from rl_cluster.modeling.loading import check_weights
from rl_cluster.rewards.before_start import check_functions
from rl_cluster.rewards.loading import check_metadata

if TYPE_CHECKING:  # each backend imports what it needs, the other's libraries not
    from rl_cluster.assembly.local import LocalSamplers
    from rl_cluster.assembly.workers import Samplers


def evaluate(config: RunConfig, plan: Plan) -> Metrics:
    """Sample and score config.eval.num_prompts held-out prompts. BadInputError before any worker starts."""
    if config.model.path is None:
        raise BadInputError("model.path is not set: an evaluation needs a trained model or a run folder.")
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    prompts = load_prompts(config.data, tokenizer)
    if not prompts.held_out:
        raise BadInputError(f"data.held_out = {config.data.held_out}: there is nothing to evaluate on.")
    check_given(config.rewards, Given())
    run_environment(config, Given())  # refuses what cannot be imported while nothing runs yet
    check_functions(config.rewards.scorers, prompts.held_out)
    check_metadata(config.rewards.scorers, prompts.held_out)
    with worker_session(config, plan):
        return asyncio.run(_evaluate(config, plan, config.model.path, tokenizer, prompts))


async def _evaluate(
    config: RunConfig, plan: Plan, model_path: str, tokenizer: Any, prompts: PromptSets
) -> Metrics:
    samplers = await _start_samplers(config, plan, model_path, tokenizer)
    try:
        evaluator = make_evaluator(config, prompts, samplers.pool, samplers.scoring)
        assert evaluator is not None
        return (await evaluator.run()).metrics
    finally:
        await samplers.close()


async def _start_samplers(
    config: RunConfig, plan: Plan, model_path: str, tokenizer: Any
) -> LocalSamplers | Samplers:
    if config.cluster.backend == "local":
        from rl_cluster.assembly.local import start_local_samplers

        return await start_local_samplers(config, plan, model_path, tokenizer, Given())
    from rl_cluster.assembly.workers import start_samplers

    # The engines load the folder themselves.
    check_weights(Path(model_path).expanduser(), f"model.path: {model_path!r}")
    return await start_samplers(config, plan, model_path, tokenizer, Given())
