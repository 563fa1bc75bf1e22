"""What the reinforcement-learning fronts stand on: a RunConfig and objects in, plain calls on an OpenRun out.

The order is the one of `launch.py train`: everything is checked before the first worker starts.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl_cluster.assembly.given import Given, check_given
from rl_cluster.assembly.run import OpenRun, open_run
from rl_cluster.assembly.starts import record_start
from rl_cluster.assembly.train import quieten_libraries, worker_session
from rl_cluster.config.checks.run import check_config
from rl_cluster.config.planning.machine import find_machine
from rl_cluster.config.planning.plan import make_plan
from rl_cluster.config.reading.changes import changes, check_last_step
from rl_cluster.config.reading.changes import check_same_settings as check_same_settings
from rl_cluster.config.reading.load import load_config
from rl_cluster.config.run import RunConfig
from rl_cluster.data.load import PromptSets
from rl_cluster.errors import BadInputError
from rl_cluster.files.atomic import recover_folder, recover_folders_in
from rl_cluster.files.manifest import MANIFEST
from rl_cluster.loop.checkpoints import (
    STATE_FILE,
    checkpoint_steps,
    choose_checkpoint,
    read_whole,
    set_aside_later,
    step_of,
)
from rl_cluster.loop.report import Metrics
from rl_cluster.loop.state import LoopState
from rl_cluster.loop.stopping import StopRequest, stop_signals
from rl_cluster.metrics.observer import open_observer
from rl_cluster.run_folder.claim import START, claim_new, make_room
from rl_cluster.run_folder.folder import held_run_folder, new_run_folder, run_dir_of, run_has_begun
from rl_cluster.trainers.background import BackgroundLoop
from rl_cluster.trajectory import Prompt


def save_start(run_dir: Path, model: Any, tokenizer: Any, name: str = "policy") -> Path:
    """The caller's model object as a Hugging Face folder under RUN/start/, which the workers load."""
    claim_new(run_dir)
    folder = make_room(run_dir / START / name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_prompts(
    run_dir: Path,
    prompts: Sequence[Any],
    metadata: Sequence[dict[str, Any]],
    name: str = "prompts.jsonl",
) -> Path:
    """RUN/start/NAME: a row per prompt (text, chat messages or token ids) with its other columns."""
    claim_new(run_dir)
    path = make_room(run_dir / START / name)
    path.write_text(prompt_lines(prompts, metadata))
    return path


def prompt_lines(prompts: Sequence[Any], metadata: Sequence[dict[str, Any]]) -> str:
    """What save_prompts writes."""
    rows = [{"prompt": prompt, **extra} for prompt, extra in zip(prompts, metadata, strict=True)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def find_checkpoint(path: str | Path, name: str, needs: str | None = None) -> Path:
    """path: the folder of a checkpoint, or of a run, whose newest whole one it is. Errors call it `name`.

    needs: a file that a checkpoint must have beside the run's own. Raises BadInputError where there is no
    checkpoint, CheckpointError where none is whole.
    """
    folder = Path(path).expanduser().absolute()
    inner = folder / "checkpoints"
    recover_folder(folder)
    recover_folders_in(inner)
    if not (folder / STATE_FILE).is_file() and checkpoint_steps(inner):
        return choose_checkpoint(inner, LoopState.read, needs=needs).path
    if not folder.is_dir() or not ((folder / STATE_FILE).is_file() or (folder / MANIFEST).is_file()):
        raise BadInputError(f"{name}: there is no checkpoint in {folder}. Give the folder of one.")
    in_a_run = folder.parent.name == "checkpoints" and (folder.parents[1] / "config.yaml").is_file()
    read_whole(folder, LoopState.read, step_of(folder.name) if in_a_run else None, needs)
    return folder


class TrainerSession:
    """An open run on a thread of its own. A context manager; `close` ends its workers, the files stay."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Any,
        probe: Sequence[Prompt],
        given: Given,
        checkpoint: Path | None = None,
    ) -> None:
        """config: with run.dir set. probe: prompts of the run, to prove published weights with.
        checkpoint: the newest of the run in run.dir, to go on from; None: a new run.

        Raises BadInputError before anything starts.
        """
        machine = find_machine(config.cluster)
        check_config(config, machine)
        check_given(config.rewards, given)
        plan = make_plan(config, machine)
        quieten_libraries(plan.device)
        if config.model.path is None:
            raise BadInputError("model: there is none. Give the trainer a model, or a name or path of one.")
        self.config = config
        with ExitStack() as stack:
            if checkpoint is None:
                self._state = None
                self.folder = stack.enter_context(new_run_folder(config))
            else:
                self.folder = stack.enter_context(held_run_folder(run_dir_of(config)))
                self._state = LoopState.read(checkpoint)
                check_last_step("run.steps", config.run.steps, self._state.step)
                set_aside_later(self.folder.checkpoints, self._state.step)
            last_step = None if self._state is None else self._state.step
            observer = stack.enter_context(open_observer(config, self.folder, last_step))
            stack.enter_context(worker_session(config, plan))
            background = BackgroundLoop()
            stack.callback(background.close)
            run = background.call(
                open_run(config, plan, self.folder, config.model.path, tokenizer, probe, observer, given)
            )
            stack.callback(lambda: background.call(run.close()))
            if checkpoint is not None:
                background.call(run.cluster.load(checkpoint))
                found = changes(load_config(self.folder.config), config)
                record_start(self.folder, config, last_step or 0, found)
            run_has_begun(self.folder)
            self._stack = stack.pop_all()
        self.background = background
        self.run: OpenRun = run

    def train(self, prompts: PromptSets, num_steps: int) -> Metrics:
        """So many steps more, those before the checkpoint included; returns the last evaluation's metrics."""
        state, self._state = self._state, None
        self.run.stop = StopRequest()
        with stop_signals(self.run.stop):
            return self.background.call(self.run.train(prompts, self.run.step + num_steps, state))

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far."""
        return self.folder.read_metrics()

    def close(self) -> None:
        """The second call does nothing."""
        self._stack.close()

    def __enter__(self) -> TrainerSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunHolder:
    """Holds the open run of a trainer: none before the first call that needs workers. It ends with `close`,
    or with the trainer."""

    session: TrainerSession | None = None
    _end: weakref.finalize[..., Any] | None = None

    def hold(self, session: TrainerSession) -> TrainerSession:
        self.session = session
        self._end = weakref.finalize(self, _close, session)
        return session

    @property
    def is_closed(self) -> bool:
        return self._end is not None and not self._end.alive

    def close(self) -> None:
        """End the workers; the second call does nothing."""
        if self._end is not None:
            self._end()


def _close(session: TrainerSession) -> None:
    # A trainer may be collected as garbage on the very thread that closing it waits for.
    if threading.current_thread().name == "rl-cluster":
        threading.Thread(target=session.close, name="closing").start()
    else:
        session.close()
