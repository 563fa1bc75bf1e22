"""What RLOOTrainer and GRPOTrainer stand on: a RunConfig, models and prompts in; training and files out.

Nothing starts before the first train or evaluate; the workers then stay until close().
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.assembly.given import Given
from rl_cluster.config.reading.load import parse_config
from rl_cluster.config.run import RunConfig
from rl_cluster.data.handed_over import plain_metadata
from rl_cluster.data.load import PromptSets
from rl_cluster.errors import BadInputError, ScorerError
from rl_cluster.loop.report import Metrics
from rl_cluster.loop.state import TRAINER_FILE, newest_checkpoint
from rl_cluster.run_folder.claim import preparing
from rl_cluster.run_folder.folder import open_run_folder
from rl_cluster.run_folder.overwrite import check_overwritable
from rl_cluster.trainers.callbacks import CallbackHooks
from rl_cluster.trainers.fields import read_settings
from rl_cluster.trainers.given import GivenModel, backend_for, saved
from rl_cluster.trainers.model_folder import copy_model, model_target
from rl_cluster.trainers.reward_trial import try_rewards
from rl_cluster.trainers.rewards_given import RewardSource
from rl_cluster.trainers.session import (
    RunHolder,
    TrainerSession,
    check_same_settings,
    find_checkpoint,
    prompt_lines,
    save_prompts,
)
from rl_cluster.trajectory import Prompt


@dataclass(frozen=True)
class Parts:
    """policy: a model object, or a folder or hub name. reference: likewise; None: the policy as it starts."""

    policy: Any
    reference: Any
    tokenizer: Any
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    rewards: tuple[RewardSource, ...]


class OnlineRun(RunHolder):
    """hooks: told of everything; every_eval: whether training itself evaluates on the held-out prompts."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        hooks: CallbackHooks,
        *,
        evaluates: bool,
        address: str | None = None,
        overwrite: bool = False,
    ) -> None:
        assert config.run.dir is not None
        self.config = config
        self.parts = parts
        self.hooks = hooks
        self.policy = GivenModel(parts.policy)
        self._evaluates = evaluates
        self._address = address
        self._overwrite = overwrite
        self.trained = False

    @property
    def folder(self) -> Path:
        """The run folder, absolute."""
        return Path(str(self.config.run.dir)).expanduser().absolute()

    def open(self, checkpoint: Path | None = None) -> TrainerSession:
        """The open run; started if it is not there yet. checkpoint: to go on from."""
        if self.is_closed:
            raise BadInputError("the trainer is closed. Make a new one, with the trained model.")
        return self.session or self.hold(self._start(checkpoint))

    def train(self, resume: str | Path | None = None) -> Metrics:
        """All steps, then the export to RUN/model, and the weights into the caller's model.

        resume: a run folder (or its newest checkpoint), whose run then goes on in place.
        """
        if self.trained:
            raise BadInputError(
                "train() has run, and its schedule is at its end. Make a new trainer to go on."
            )
        checkpoint = None if resume is None else self._resumed(resume)
        session = self.open(checkpoint)
        if checkpoint is not None:
            self.hooks.load(checkpoint)
        held_out = self.parts.held_out if self._evaluates else ()
        with self._user_words():
            last = session.train(PromptSets(self.parts.train, held_out), self.config.run.steps)
        self.trained = True
        if self.hooks.args.load_best_model_at_end:
            self._take_best(session)
        session.background.call(session.run.export())
        self.policy.put_back(session.folder.model)
        return last

    def _take_best(self, session: TrainerSession) -> None:
        best = self.hooks.state.best_model_checkpoint
        if best is not None and Path(best).is_dir():
            session.background.call(session.run.load_weights(Path(best)))
            return
        step = self.hooks.state.best_global_step
        session.run.observer.note(
            f"load_best_model_at_end: the best evaluation was at update {step}, of which there is no "
            "checkpoint; the model of the last update stays."
        )

    def evaluate(self, prompts: tuple[Prompt, ...]) -> Metrics:
        """Of the policy as it is now."""
        session = self.open()
        with self._user_words():
            return session.background.call(session.run.evaluate(PromptSets((), prompts)))

    def save_model(self, output_dir: Any) -> None:
        """Weights, tokenizer and card of now, into `output_dir`; that of the run itself gets them, too."""
        target = model_target(output_dir, "save_model: output_dir", self.folder)
        if not self.is_closed:
            session = self.open()
            session.background.call(session.run.export())
        copy_model(self.folder / "model", target)

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl so far."""
        return [] if self.session is None else self.session.metrics()

    @contextmanager
    def _user_words(self) -> Iterator[None]:
        """A reward that is no reward is the user's bad input, whatever else the scorer's failure says."""
        try:
            yield
        except ScorerError as error:
            problems = [s.scorer.problem for s in self.parts.rewards if s.scorer is not None]
            problem = next((problem for problem in problems if problem is not None), None)
            if problem is None:
                raise
            raise problem from error

    def _resumed(self, resume: str | Path) -> Path:
        """The checkpoint to go on from; its run folder becomes this run's."""
        if self.session is not None:
            raise BadInputError("resume_from_checkpoint: the workers run already. Train before you evaluate.")
        checkpoint = find_checkpoint(resume, "resume_from_checkpoint", TRAINER_FILE)
        newest = newest_checkpoint(checkpoint.parent)
        if checkpoint != newest and Path(resume).expanduser().absolute() == checkpoint:
            raise BadInputError(
                f"resume_from_checkpoint={str(resume)!r}: {newest.name} is newer, and its metrics follow in "
                "the same folder. Delete the later checkpoints, or resume from the newest."
            )
        section = self.config.run.model_copy(update={"dir": str(checkpoint.parents[1])})
        self.config = self.config.model_copy(update={"run": section})
        return checkpoint

    def _start(self, checkpoint: Path | None) -> TrainerSession:
        if self._address is not None:
            os.environ["RAY_ADDRESS"] = self._address
        if checkpoint is not None:
            config = self._with_paths(resumed=True)
            check_same_settings(open_run_folder(self.folder).read_config(), config)
            return self._open(config, checkpoint)
        if self._overwrite:
            check_overwritable(self.folder)
        with preparing(self.folder, self._overwrite):
            return self._open(self._with_paths(resumed=False), None)

    def _open(self, config: RunConfig, checkpoint: Path | None) -> TrainerSession:
        scorers = {s.name: s.scorer.score for s in self.parts.rewards if s.scorer is not None}
        self._try_rewards()
        return TrainerSession(
            config,
            self.parts.tokenizer,
            self.parts.train,
            Given(scorers=scorers, hooks=(self.hooks,)),
            checkpoint,
        )

    def _try_rewards(self) -> None:
        for source in self.parts.rewards:
            if source.scorer is not None and not source.is_environment:
                try_rewards({source.name: source.scorer.score}, self.parts.train[0])
                source.scorer.problem = None

    def _with_paths(self, resumed: bool) -> RunConfig:
        """Models and prompts that are objects become files in RUN/start, which the configuration names.

        resumed: they are there; the prompts must be the same.
        """
        parts, config = self.parts, self.config

        def path_of(model: Any, name: str, tokenizer: Any = None) -> str | None:
            if resumed and model is not None and not isinstance(model, str):
                return str(self.folder / "start" / name)
            return None if model is None else saved(model, self.folder, tokenizer or parts.tokenizer, name)

        model = config.model.model_copy(
            update={
                "path": path_of(parts.policy, "policy"),
                "reference_path": path_of(parts.reference, "reference"),
            }
        )
        scorers = [
            source.section(path_of(source.module, f"reward-{number}", source.tokenizer))
            for number, source in enumerate(parts.rewards)
        ]
        prompts = self._prompt_file("train_dataset", parts.train, plain_metadata(parts.train), resumed)
        held_out = None
        if self._evaluates:
            held_out = self._prompt_file("eval_dataset", parts.held_out, [{}] * len(parts.held_out), resumed)
        data = config.model_dump(mode="json", by_alias=True)
        data["model"] = model.model_dump(mode="json")
        data["data"]["train"] |= {"path": prompts, "eval_path": held_out}
        data["rewards"]["scorers"] = scorers
        data["run"]["dir"] = str(self.folder)
        return parse_config(data, "")

    def _prompt_file(
        self, field: str, prompts: Sequence[Prompt], metadata: Sequence[dict[str, Any]], resumed: bool
    ) -> str:
        name = "prompts.jsonl" if field == "train_dataset" else "eval_prompts.jsonl"
        path = self.folder / "start" / name
        ids = [prompt.tokens.tolist() for prompt in prompts]
        if not resumed:
            save_prompts(self.folder, ids, metadata, name)
        elif not path.is_file() or path.read_text() != prompt_lines(ids, metadata):
            raise BadInputError(
                f"{field}: its prompts are not those of the run in {self.folder}. Resume with the same data, "
                "or start a new run from its model."
            )
        return str(path)


def with_backend(config: RunConfig, asked: str, address: str | None, settings: Any, model: Any) -> RunConfig:
    """local for small models, unless a cluster is named or the user has chosen."""
    if "cluster.backend" in read_settings(settings):
        return config
    backend = backend_for(asked, address, model)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"backend": backend})})
