"""A run from its configuration to its exported model, for the command line; the fronts open runs themselves.

What starts workers is assembly/run.py; this is what stands around it: folder, resume, evaluation, export.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rl_cluster.assembly.environment import run_environment
from rl_cluster.assembly.given import Given, check_given
from rl_cluster.assembly.run import open_run
from rl_cluster.assembly.starts import GoingOn, point_to_go_on, record_start, tell
from rl_cluster.assembly.warm_start import imitate, scratch_folder
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.planning.fit_plan import FitPlan
from rl_cluster.config.planning.plan import Plan
from rl_cluster.config.run import RunConfig
from rl_cluster.data.demonstrations import demonstrations
from rl_cluster.data.load import PromptSets, load_prompts
from rl_cluster.data.stream import PromptStream
from rl_cluster.errors import BadInputError
from rl_cluster.loop.report import Metrics
from rl_cluster.loop.state import LoopState
from rl_cluster.loop.stopping import stop_signals
from rl_cluster.metrics.observer import RunObserver, open_observer
from rl_cluster.modeling.load import check_model_path
from rl_cluster.rewards.before_start import check_functions
from rl_cluster.rewards.loading import check_metadata
from rl_cluster.run_folder.folder import RunFolder, run_dir_of


def train(
    config: RunConfig,
    plan: Plan,
    resume: Path | None = None,
    step: int | None = None,
    force_changes: bool = False,
) -> Metrics:
    """Run to the last step; returns the metrics of the last evaluation.

    resume: the run folder, to go on from its newest whole checkpoint (CheckpointError if there is none), or
    from that of `step`. force_changes: also with settings that make another run of it.
    Bad data, tokenizers and models raise BadInputError before any worker starts.
    """
    quieten_libraries(plan.device)
    folder = RunFolder(run_dir_of(config))
    start = None if resume is None else point_to_go_on(folder, config, step, force_changes)
    model_path = config.model.path or str(scratch_folder(config, folder))
    tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
    prompts = load_prompts(config.data, tokenizer)
    check_given(config.rewards, Given())
    run_environment(config, Given())  # refuses what cannot be imported while nothing runs yet
    check_functions(config.rewards.scorers, prompts.train)
    check_metadata(config.rewards.scorers, [*prompts.train, *prompts.held_out])
    if config.model.supervised is not None:
        demonstrations(prompts.train, tokenizer)  # refuses prompts without an answer while nothing runs yet
    if start is not None:  # refuses other data while nothing runs yet
        PromptStream(prompts.train, config.run.seed, config.data.shuffle).load_state(start.state.stream)
    notes = () if start is None else start.take_over(folder)
    with (
        open_observer(config, folder, None if start is None else start.state.step) as observer,
        worker_session(config, plan),
    ):
        tell(observer, folder, notes)
        if prompts.skipped:
            observer.note(f"{len(prompts.skipped)} bad rows left out; the first: {prompts.skipped[0]}")
        return asyncio.run(_train(config, plan, folder, model_path, tokenizer, prompts, observer, start))


def worker_session(config: RunConfig | FitConfig, plan: Plan | FitPlan) -> AbstractContextManager[None]:
    """What the run's workers live in: a Ray cluster, or for the local backend nothing."""
    if config.cluster.backend == "local":
        return nullcontext()
    from rl_cluster.assembly.session import ray_session

    return ray_session(plan)


def quieten_libraries(device: str) -> None:
    """What transformers and DeepSpeed would write over the progress display."""
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.disable_progress_bar()


async def _train(
    config: RunConfig,
    plan: Plan,
    folder: RunFolder,
    model_path: str,
    tokenizer: Any,
    prompts: PromptSets,
    observer: RunObserver,
    start: GoingOn[LoopState] | None,
) -> Metrics:
    if config.model.supervised is not None:
        trained = await imitate(config, plan, folder, model_path, prompts.train, tokenizer, observer)
        model_path = str(trained)
    run = await open_run(config, plan, folder, model_path, tokenizer, prompts.train, observer)
    try:
        if start is not None:
            await run.cluster.load(start.checkpoint)
            record_start(folder, config, start.state.step, start.changes)
        with stop_signals(run.stop):
            last = await run.train(prompts, config.run.steps, None if start is None else start.state)
        observer.phase("exporting")
        await run.export()
        observer.note(ending(folder, last))
        return last
    finally:
        await run.close()


def load_tokenizer(model_path: str, trust_remote_code: bool) -> Any:
    """Raises BadInputError when the model's folder has none."""
    from transformers import AutoTokenizer

    check_model_path(model_path)
    try:
        return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise BadInputError(
            f"model.path = {model_path}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}. "
            "Save the tokenizer beside the weights (tokenizer.save_pretrained)."
        ) from error


def ending(folder: RunFolder, after: Metrics) -> str:
    """The last lines on the screen: where the run is, and what changed."""
    lines = [f"run folder: {folder.path}", f"model:      {folder.model}"]
    rows = [row for row in folder.read_metrics() if row.get("eval/score_mean") is not None]
    for name in ("eval/score_mean", "eval/accuracy"):
        if rows and after.get(name) is not None:
            first, last = rows[0][name], after[name]
            lines.append(f"{name}: {first:.3f} before, {last:.3f} after ({last - first:+.3f})")
    return "\n".join(lines)
