"""Training on fixed data from its configuration to its exported model, on Ray or in this process."""

from __future__ import annotations

import asyncio
import json
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from learners.group import LearnerGroup
from learners.spec import LearnerSpec
from rl_cluster.algorithms.fit_table import compares_with_reference, fit_step, reference_model
from rl_cluster.assembly.learner import start_learner
from rl_cluster.assembly.starts import GoingOn, going_on, record_start, tell
from rl_cluster.assembly.train import load_tokenizer, quieten_libraries, worker_session
from rl_cluster.assembly.warm_start import scratch_folder
from rl_cluster.config.checks.fit import check_fit_config
from rl_cluster.config.fit import FitConfig, RewardObjective
from rl_cluster.config.planning.fit_plan import FitPlan, make_fit_plan
from rl_cluster.config.planning.machine import find_machine
from rl_cluster.config.reading.changes import check_last_step
from rl_cluster.data.encode import special_tokens
from rl_cluster.data.pairs import FitRows, FitSets, GivenRows, load_fit_data
from rl_cluster.errors import CheckpointError
from rl_cluster.files.atomic import folder_atomically, write_atomically
from rl_cluster.loop.checkpoints import LEARNER
from rl_cluster.loop.fit import FitLoop, FitState, check_same_rows, total_steps, warmup_steps
from rl_cluster.loop.fit_pass import attach, attached, evaluate, kl_baseline, with_reference
from rl_cluster.loop.fit_report import Metrics, fit_metrics
from rl_cluster.loop.hooks import Hooks
from rl_cluster.loop.stopping import StopRequest, stop_signals
from rl_cluster.metrics.console import open_console
from rl_cluster.metrics.observer import RunObserver, open_observer
from rl_cluster.modeling.score_model import merge_adapter
from rl_cluster.run_folder.card import write_fit_card
from rl_cluster.run_folder.folder import (
    RunFolder,
    held_run_folder,
    new_run_folder,
    open_run_folder,
    preparing_run,
    run_dir_of,
)


@dataclass(frozen=True)
class FitResult:
    """metrics: as in metrics.jsonl, one dict per step. last: the last evaluation. folder: the run's.
    model: the exported Hugging Face folder (under LoRA a peft adapter, of reward models merged)."""

    metrics: list[dict[str, Any]]
    last: Metrics
    folder: Path
    model: Path


def fit(
    config: FitConfig,
    *,
    resume: str | Path | None = None,
    step: int | None = None,
    force_changes: bool = False,
    hooks: Sequence[Hooks] = (),
    tokenizer: Any = None,
    rows: GivenRows | None = None,
    eval_rows: GivenRows | None = None,
) -> FitResult:
    """Train to the last step and export.

    resume: a run folder, to go on from its newest whole checkpoint (CheckpointError if there is none), or
    from that of `step`. force_changes: also with settings that make another fit of it.
    tokenizer: instead of the model's own. rows, eval_rows: the data, where data.source is given.
    Bad settings and rows raise BadInputError before a worker starts, a model that cannot be trained when it
    is loaded; neither leaves a run folder behind.
    """
    if resume is not None:
        section = config.run.model_copy(update={"dir": str(open_run_folder(resume).path)})
        config = config.model_copy(update={"run": section})
    machine = find_machine(config.cluster)
    check_fit_config(config, machine)
    plan = make_fit_plan(config, machine)
    quieten_libraries(plan.device)
    tokenizer = tokenizer or _tokenizer(config)
    sets = load_fit_data(config.data, config.objective, tokenizer, plan.max_length, rows, eval_rows)
    steps = total_steps(config, sets.train.num_examples)
    with ExitStack() as stack:
        start, notes = None, tuple[str, ...]()
        if resume is None:
            config = stack.enter_context(preparing_run(config))
            folder = stack.enter_context(new_run_folder(config))
        else:
            folder = stack.enter_context(held_run_folder(run_dir_of(config)))
            start = fit_to_go_on(folder, config, sets, step, force_changes)
            notes = start.take_over(folder)
        last_step = None if start is None else start.state.step
        observer = stack.enter_context(open_observer(config, folder, last_step, steps))
        stack.enter_context(worker_session(config, plan))
        tell(observer, folder, notes)
        if sets.skipped:
            observer.note(f"{len(sets.skipped)} bad rows left out; the first: {sets.skipped[0]}")
        run = _Run(config, plan, folder, tokenizer, observer)
        last = asyncio.run(run.fit(sets, start, hooks))
    return FitResult(folder.read_metrics(), last, folder.path, folder.model)


def fit_to_go_on(
    folder: RunFolder, config: FitConfig, sets: FitSets, step: int | None, force_changes: bool
) -> GoingOn[FitState]:
    """As starts.going_on; refuses other rows, and an end before the checkpoint, too."""
    start = going_on(folder, config, FitState.read, step, force_changes)
    field = "run.steps" if config.run.steps else "run.epochs, in steps,"
    check_last_step(field, total_steps(config, sets.train.num_examples), start.state.step)
    check_same_rows(start.state, sets)
    return start


def evaluate_fit(config: FitConfig, rows: GivenRows, tokenizer: Any = None) -> Metrics:
    """eval/loss, eval/accuracy, … of the model of `config` on rows, without training or a run folder.

    What the objective compares with is objective.reference_model, or else the model itself.
    """
    machine = find_machine(config.cluster)
    check_fit_config(config, machine)
    plan = make_fit_plan(config, machine)
    quieten_libraries(plan.device)
    tokenizer = tokenizer or _tokenizer(config)
    sets = load_fit_data(config.data, config.objective, tokenizer, plan.max_length, rows)
    with tempfile.TemporaryDirectory() as scrap, worker_session(config, plan):
        observer = RunObserver((), open_console("none", 0))
        run = _Run(config, plan, RunFolder(Path(scrap)), tokenizer, observer)
        return asyncio.run(run.evaluate(sets))


def _tokenizer(config: FitConfig) -> Any:
    """The model's own; a scratch model's is made without its folder."""
    if config.model.scratch is None:
        assert config.model.path is not None
        return load_tokenizer(config.model.path, config.model.trust_remote_code)
    from rl_cluster.modeling.scratch import build_tokenizer

    return build_tokenizer(config.model.scratch.alphabet, config.model.scratch.max_positions)


@dataclass(frozen=True)
class _Run:
    config: FitConfig
    plan: FitPlan
    folder: RunFolder
    tokenizer: Any
    observer: RunObserver

    @property
    def model_path(self) -> str:
        return self.config.model.path or str(scratch_folder(self.config, self.folder))

    async def fit(self, sets: FitSets, start: GoingOn[FitState] | None, hooks: Sequence[Hooks]) -> Metrics:
        own_reference = reference_model(self.config.objective)
        if compares_with_reference(self.config.objective) and own_reference is not None:
            spec = replace(self._spec(1), model_path=own_reference, lora=None)
            sets = await self._with_reference(sets, spec, None)
        self.observer.phase("starting the learner")
        spec = self._spec(total_steps(self.config, sets.train.num_examples))
        learner = await start_learner(self.config, self.plan, spec, "learner")
        try:
            if compares_with_reference(self.config.objective) and own_reference is None:
                sets = await self._with_reference(sets, spec, learner)
            if start is not None:
                await learner.load(start.checkpoint / LEARNER)
                record_start(self.folder, self.config, start.state.step, start.changes)
            state = None if start is None else start.state
            stop = StopRequest()
            loop = FitLoop(self.config, learner, sets, self.observer, self.folder.path, state, hooks, stop)
            with stop_signals(stop):
                last = await loop.run()
            self.observer.phase("exporting")
            await self._export(learner)
        finally:
            learner.close()
        self.observer.note(f"run folder: {self.folder.path}\nmodel:      {self.folder.model}")
        return last

    async def evaluate(self, sets: FitSets) -> Metrics:
        """Of the training rows of `sets`."""
        compares = compares_with_reference(self.config.objective)
        own_reference = reference_model(self.config.objective)
        if compares and own_reference is not None:
            sets = await self._with_reference(
                sets, replace(self._spec(1), model_path=own_reference, lora=None), None
            )
        learner = await start_learner(self.config, self.plan, self._spec(1), "learner")
        try:
            if compares and own_reference is None:
                sets = await self._with_reference(sets, self._spec(1), learner)
            z0 = await kl_baseline(learner, sets.train)
            totals = await evaluate(learner, sets.train, fit_step(self.config.objective, z0))
            return fit_metrics(totals, "eval")
        finally:
            learner.close()

    def _spec(self, steps: int) -> LearnerSpec:
        config = self.config
        optimizer = config.optimizer.model_copy(update={"warmup_steps": warmup_steps(config, steps)})
        return LearnerSpec(
            model_path=self.model_path,
            tokens_per_micro_batch=config.batch.tokens_per_micro_batch,
            total_steps=steps,
            optimizer=optimizer,
            dtype=config.model.dtype,
            kind="reward" if isinstance(config.objective, RewardObjective) else "policy",
            lora=config.model.lora,
            disable_dropout=config.model.disable_dropout,
            gradient_checkpointing=config.model.gradient_checkpointing,
            trust_remote_code=config.model.trust_remote_code,
            engine="torch" if config.cluster.backend == "local" else "deepspeed",
            zero_stage=config.learner.zero_stage,
            offload_optimizer=config.learner.offload_optimizer,
            device=self.plan.device,
            num_threads=self.plan.workers[0].threads,
            seed=config.run.seed,
            deadline_seconds=config.learner.deadline_seconds,
            start_deadline_seconds=config.cluster.start_deadline_seconds,
            pad_token_id=special_tokens(self.tokenizer).pad,
        )

    async def _with_reference(
        self, sets: FitSets, spec: LearnerSpec, learner: LearnerGroup | None
    ) -> FitSets:
        """From the run folder, or computed at the weights of `spec`; learner None: by one of its own."""
        key = [self._lasting(spec.model_path), sets.train.fingerprint, _fingerprint(sets.evaluation)]
        if self.folder.reference.is_file():
            return self._read_reference(key, sets)
        self.observer.phase("reference log-probabilities")
        worker = learner or await start_learner(self.config, self.plan, spec, "reference")
        try:
            train = await with_reference(worker, sets.train)
            evaluation = None if sets.evaluation is None else await with_reference(worker, sets.evaluation)
        finally:
            if learner is None:
                worker.close()
        found = replace(sets, train=train, evaluation=evaluation)
        _write_reference(self.folder.reference, key, found)
        return found

    def _read_reference(self, key: list[str | None], sets: FitSets) -> FitSets:
        """Raises CheckpointError for a damaged file or one of other data or another model."""
        path = self.folder.reference
        try:
            columns = dict(np.load(path))
            model, *fingerprints = json.loads(str(columns["key"]))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if [self._lasting(model), *fingerprints] != key:
            raise CheckpointError(
                f"{path} was computed for other rows or another model; resume with the data, tokenizer and "
                "model of the first start"
            )

        def attach_to(rows: FitRows | None, name: str) -> FitRows | None:
            return None if rows is None else attach(rows, columns[name], columns.get(f"{name}_mismatched"))

        train = attach_to(sets.train, "train")
        assert train is not None
        return replace(sets, train=train, evaluation=attach_to(sets.evaluation, "eval"))

    def _lasting(self, path: str) -> str:
        """A path that is the same after the run folder has moved."""
        inside = Path(path).is_relative_to(self.folder.path)
        return str(Path(path).relative_to(self.folder.path)) if inside else path

    async def _export(self, learner: LearnerGroup) -> None:
        adapter = self.folder.path / "adapter"
        merges = isinstance(self.config.objective, RewardObjective) and self.config.model.lora is not None
        with folder_atomically(adapter if merges else self.folder.model, "model") as partial:
            await learner.export(partial)
            self.tokenizer.save_pretrained(partial)
        if merges:
            with folder_atomically(self.folder.model, "model") as partial:
                pad = special_tokens(self.tokenizer).pad
                merge_adapter(self.model_path, adapter, partial, pad, self.config.model.trust_remote_code)
                self.tokenizer.save_pretrained(partial)
        write_fit_card(self.config, self.folder)


def _fingerprint(rows: FitRows | None) -> str | None:
    return None if rows is None else rows.fingerprint


def _write_reference(path: Path, key: list[str | None], sets: FitSets) -> None:
    columns: dict[str, np.ndarray] = {"key": np.array(json.dumps(key))}
    for name, rows in (("train", sets.train), ("eval", sets.evaluation)):
        if rows is not None:
            own, other = attached(rows)
            columns[name] = own
            if other is not None:
                columns[f"{name}_mismatched"] = other
    buffer = BytesIO()
    np.savez(buffer, **columns)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())
