"""What the reinforcement-learning fronts stand on: a RunConfig and objects in, plain calls on an OpenRun out.

The order is the one of `launch.py train`: everything is checked before the first worker starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl_cluster.assembly.given import Given, check_given
from rl_cluster.assembly.run import OpenRun, open_run
from rl_cluster.assembly.train import quieten_libraries, worker_session
from rl_cluster.config.backend import BackendChoice as BackendChoice
from rl_cluster.config.backend import choose_backend as choose_backend
from rl_cluster.config.check import check_config
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.machine import find_machine
from rl_cluster.config.plan import make_plan
from rl_cluster.config.run import RunConfig
from rl_cluster.data.load import PromptSets
from rl_cluster.errors import BadInputError
from rl_cluster.loop.report import Metrics
from rl_cluster.loop.state import STATE_FILE, LoopState, checkpoint_steps, newest_checkpoint
from rl_cluster.metrics.observer import open_observer
from rl_cluster.run_claim import START, claim_new, make_room
from rl_cluster.run_folder import (
    go_on_in_run_folder,
    held_run_folder,
    new_run_folder,
    run_dir_of,
    run_has_begun,
)
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


def find_checkpoint(path: str | Path, name: str) -> Path:
    """path: the folder of a checkpoint, or of a run, whose newest it is. Errors call it `name`."""
    folder = Path(path).expanduser().absolute()
    inner = folder / "checkpoints"
    if not (folder / STATE_FILE).is_file() and checkpoint_steps(inner):
        folder = newest_checkpoint(inner)
    if not (folder / STATE_FILE).is_file():
        raise BadInputError(f"{name}: there is no checkpoint in {folder}. Give the folder of one.")
    return folder


MAY_CHANGE = ("run.steps", "run.epochs", "run.dir", "eval.", "checkpoint.", "log.")
"""Settings, or sections of them, that a resumed run may have otherwise than before."""


def check_same_settings(before: RunConfig | FitConfig, now: RunConfig | FitConfig) -> None:
    """Raise BadInputError where a resumed run has settings that would train otherwise than before."""
    old, new = (_flat(config.model_dump(mode="json", by_alias=True)) for config in (before, now))
    for name in {**old, **new}:
        # A run whose last batch was cut short cannot have the rest of its updates later.
        if name == "run.max_updates" and old.get(name) is None:
            continue
        if old.get(name) != new.get(name) and not name.startswith(MAY_CHANGE):
            raise BadInputError(
                f"resume_from_checkpoint: {name} is {new.get(name)!r} and was {old.get(name)!r} in "
                f"{now.run.dir}. Resume with the settings of that run, or start a new run from its model."
            )


def _flat(data: Any, name: str = "") -> dict[str, Any]:
    """Dotted names -> values."""
    if not isinstance(data, dict) or not data:
        return {name: data}
    parts = [_flat(value, f"{name}.{key}" if name else str(key)) for key, value in data.items()]
    return {key: value for part in parts for key, value in part.items()}


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
                go_on_in_run_folder(config)
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
            run_has_begun(self.folder)
            self._stack = stack.pop_all()
        self.background = background
        self.run: OpenRun = run

    def train(self, prompts: PromptSets, num_steps: int) -> Metrics:
        """So many steps more, those before the checkpoint included; returns the last evaluation's metrics."""
        state, self._state = self._state, None
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
