"""Checked arguments of a PPOTrainer in; its open run, started at the first call that needs workers, out."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_cluster.assembly.given import Given
from rl_cluster.config.environment import EnvironmentConfig
from rl_cluster.config.reward import CallableScorer, EnvironmentScorer, RewardModelScorer, ScorerConfig
from rl_cluster.data.handed_over import plain_metadata
from rl_cluster.data.load import PromptSets
from rl_cluster.errors import BadInputError
from rl_cluster.loop.hooks import Hooks
from rl_cluster.run_folder.folder import preparing_run, run_dir_of
from rl_cluster.trainers.defaults import is_given
from rl_cluster.trainers.given import backend_for, checked_tokenizer, max_positions, saved
from rl_cluster.trainers.ppo.arguments import PPOArguments
from rl_cluster.trainers.ppo.checks import num_mini_batches, prompt_limit
from rl_cluster.trainers.ppo.config import PPOConfig
from rl_cluster.trainers.ppo.environment import EnvironmentSource, temperature_of
from rl_cluster.trainers.ppo.history import IterationLog
from rl_cluster.trainers.ppo.run_config import RunPlace, ppo_run_config
from rl_cluster.trainers.ppo.weights import UserModel
from rl_cluster.trainers.reward_signatures import RewardScorer
from rl_cluster.trainers.reward_trial import try_rewards
from rl_cluster.trainers.rewards_given import check_single_label, is_sequence_classifier
from rl_cluster.trainers.session import RunHolder, TrainerSession, save_prompts
from rl_cluster.trajectory import Prompt

REWARD = "reward"
"""The scorer's name: rewards/reward in the metrics."""


@dataclass(frozen=True)
class Opening:
    """What the first call needs: its prompts (they also prove published weights), and who plays with them."""

    prompts: Sequence[Prompt]
    environment: EnvironmentSource | None = None


class PPORun(RunHolder):
    """session: None until `open`. log: the metrics of every iteration of train()."""

    def __init__(self, arguments: PPOArguments, callbacks: Sequence[Any]) -> None:
        self.config = arguments.config
        self.model = UserModel(arguments.model, "PPOTrainer.model")
        reference = arguments.ref_model
        self.reference = None if reference is None else UserModel(reference, "PPOTrainer.ref_model")
        known = self.model.known
        self.tokenizer = checked_tokenizer("PPOTrainer.tokenizer", arguments.tokenizer, known)
        self.prompt_limit = prompt_limit(self.config, max_positions(known))
        self.scorer = RewardScorer(None)
        self.reward_model = _reward_model(arguments.reward_fn)
        self.log = IterationLog()
        self._callbacks = callbacks
        self._started_with: PPOConfig | None = None
        self._environment: EnvironmentSource | None = None
        self._checkpoint: Path | None = None

    def open(self, opening: Opening, eval_prompts: Sequence[Prompt] = ()) -> TrainerSession:
        """Start the workers, at the first call; later calls check that they can go on with these."""
        if self.session is None:
            self._start(opening, eval_prompts)
        assert self.session is not None
        self._check_unchanged(opening)
        if self._checkpoint is not None:
            checkpoint, self._checkpoint = self._checkpoint, None
            prompts = PromptSets(tuple(opening.prompts), ())
            self.session.background.call(self.session.run.load(checkpoint, prompts))
        return self.session

    def go_on_from(self, checkpoint: Path) -> None:
        """At the next `open`."""
        self._checkpoint = checkpoint

    @property
    def is_waiting_for_checkpoint(self) -> bool:
        return self._checkpoint is not None

    def take_weights(self) -> None:
        """Into the user's own model object, where there is one and the whole model is trained."""
        session = self.session
        if session is not None and self.model.is_loaded and session.config.model.lora is None:
            self.model.take(session.background.call(session.run.weights()))

    def _start(self, opening: Opening, eval_prompts: Sequence[Prompt]) -> None:
        config = self.config
        if self.model.checkpoints_gradients():
            config = replace(config, gradient_checkpointing=True)
        backend = self._backend()
        # Once without files, to check everything and to find the folder that they belong into.
        draft = ppo_run_config(config, self._place(opening, backend))
        with preparing_run(draft) as prepared:
            session = self._session(config, opening, backend, run_dir_of(prepared), eval_prompts)
        self.hold(session)
        self._environment = opening.environment
        self._started_with = copy.deepcopy(self.config)

    def _session(
        self,
        config: PPOConfig,
        opening: Opening,
        backend: str,
        run_dir: Path,
        eval_prompts: Sequence[Prompt],
    ) -> TrainerSession:
        scorers = {REWARD: self.scorer}
        if opening.environment is not None or self.reward_model is not None:
            scorers = {}
        if self.scorer.call is not None:
            try_rewards(scorers, opening.prompts[0])
        reward_path, reference = "", self.reference
        if self.reward_model is not None:
            reward_path = saved(self.reward_model, run_dir, self.tokenizer, REWARD)
        place = replace(
            self._place(opening, backend, reward_path),
            run_dir=str(run_dir),
            eval_path=self._save_eval(run_dir, eval_prompts),
            model_path=self.model.save(run_dir, self.tokenizer),
            reference_path=None
            if reference is None
            else reference.save(run_dir, self.tokenizer, "reference"),
            prompts_path=str(save_prompts(run_dir, *_columns(opening.prompts))),
        )
        given = Given(
            scorers=scorers,
            environment=opening.environment,
            hooks=self._hooks(str(run_dir)),
        )
        return TrainerSession(ppo_run_config(config, place), self.tokenizer, opening.prompts, given)

    def _place(self, opening: Opening, backend: Any, reward_path: str = "start/reward") -> RunPlace:
        scorer: ScorerConfig = CallableScorer(name=REWARD, timeout_seconds=self.config.reward_timeout_seconds)
        if self.reward_model is not None:
            scorer = RewardModelScorer(
                name=REWARD, path=reward_path, timeout_seconds=self.config.reward_timeout_seconds
            )
        environment, temperature = None, None
        stop: tuple[str, ...] = ()
        if opening.environment is not None:
            scorer, environment = EnvironmentScorer(name=REWARD), EnvironmentConfig()
            played = opening.environment.environment
            temperature = temperature_of(played)
            stop = tuple(getattr(played, "stop_sequences", None) or ())
        return RunPlace(
            run_dir=self.config.output_dir,
            model_path=self.model.source if isinstance(self.model.source, str) else "model",
            prompts_path="prompts.jsonl",
            scorer=scorer,
            backend=backend,
            max_positions=max_positions(self.model.known),
            environment=environment,
            temperature=temperature,
            stop=stop,
        )

    def _backend(self) -> str:
        if self.config.cluster is not None:
            os.environ["RAY_ADDRESS"] = self.config.cluster
        return backend_for(self.config.backend, self.config.cluster, self.model.known)

    def _save_eval(self, run_dir: Path, eval_prompts: Sequence[Prompt]) -> str | None:
        if not eval_prompts:
            return None
        return str(save_prompts(run_dir, *_columns(eval_prompts), "eval_prompts.jsonl"))

    def _hooks(self, run_dir: str) -> tuple[Hooks, ...]:
        own = tuple(callback for callback in self._callbacks if is_hooks(callback))
        callbacks = [callback for callback in self._callbacks if not is_hooks(callback)]
        if not callbacks:
            return (self.log, *own)
        from transformers import TrainingArguments

        from rl_cluster.trainers.callbacks import CallbackHooks

        config = self.config
        arguments = TrainingArguments(
            output_dir=run_dir, logging_steps=1, report_to=[], per_device_train_batch_size=config.batch_size
        )
        updates = config.ppo_epochs * num_mini_batches(config)
        model = self.model.module if self.model.is_loaded else None
        hooks = CallbackHooks(
            arguments,
            callbacks,
            updates_per_step=updates,
            model=model,
            processing_class=self.tokenizer,
        )
        return (self.log, *own, hooks)

    def _check_unchanged(self, opening: Opening) -> None:
        changed = changed_setting(self.config, self._started_with)
        if changed is not None:
            raise BadInputError(
                f"PPOConfig.{changed}: was changed after the workers had started, and can no longer act. "
                "Change settings before the first call, or make a new trainer from trainer.model."
            )
        if opening.environment is not self._environment:
            raise BadInputError(
                "train: this trainer has begun with "
                f"{'prompts' if self._environment is None else 'an environment'}. Make a new one, from "
                "trainer.model, to go on with the other."
            )


def is_hooks(callback: Any) -> bool:
    """Whether it is loop.Hooks, and not a TrainerCallback of transformers (an object or a class)."""
    return not isinstance(callback, type) and all(
        callable(getattr(callback, name, None)) for name in ("on_begin", "on_evaluate", "on_step", "on_save")
    )


def changed_setting(now: PPOConfig, before: PPOConfig | None) -> str | None:
    """The first setting that differs, also where a default was only now given as such."""
    if before is None:
        return None
    for name, value in vars(now).items():
        old = getattr(before, name)
        if value != old or is_given(value) != is_given(old):
            return name
    return None


def _reward_model(reward: Any) -> Any:
    """A sequence-classification model or the name of one, which a worker scores with; None: anything else."""
    if is_sequence_classifier(reward):
        check_single_label(reward, "PPOTrainer.reward_fn")
        return reward
    return reward if isinstance(reward, str) else None


def _columns(prompts: Sequence[Prompt]) -> tuple[list[Any], list[dict[str, Any]]]:
    """Token ids, which need no encoding a second time, and metadata."""
    return [prompt.tokens.tolist() for prompt in prompts], plain_metadata(prompts)
