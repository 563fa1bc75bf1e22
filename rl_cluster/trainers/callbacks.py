"""transformers TrainerCallbacks in, Hooks of the loop out: the same callbacks as with transformers' Trainer.

What they ask for in TrainerControl becomes a wish of the loop; what they read is kept in a TrainerState.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.files.atomic import write_atomically
from rl_cluster.loop.hooks import Wishes
from rl_cluster.loop.state import TRAINER_FILE

Metrics = Mapping[str, float | None]

EVALUATION_METRICS = ("loss", "reward", "score_mean", "accuracy", "mean_length")
"""What metric_for_best_model may be in online training, beside pass@k. loss: minus the mean score, which
makes it transformers' default for load_best_model_at_end: there is no other loss of an evaluation."""


class CallbackHooks:
    """Implements rl_cluster.loop.hooks.Hooks for callbacks (objects or classes, as in transformers).

    args: decides what is logged when (logging_strategy, logging_steps, logging_first_step; the last step
    always is) and what the best metric is. A global step is an optimizer update: updates_per_step of them
    make a step of the loop, max_updates at most the run. steps_per_epoch: of the loop, may be a fraction.

    `state.log_history` and on_log receive the metrics of the step that is logged, by the names of
    metrics.jsonl; evaluations appear as eval/NAME and, as transformers writes them, eval_NAME, with
    eval_reward for the mean score. on_step_begin comes right after on_step_end of the step before, so before
    that step's evaluation and checkpoint. Dataloaders, optimizer and scheduler live in the learner: callbacks
    get None for them.
    """

    def __init__(
        self,
        args: TrainingArguments,
        callbacks: Sequence[Any] = (),
        *,
        steps_per_epoch: float | None = None,
        updates_per_step: int = 1,
        max_updates: int | None = None,
        model: Any = None,
        processing_class: Any = None,
    ) -> None:
        self.args = args
        self.callbacks = [_made(callback) for callback in callbacks]
        self.model = model
        self.processing_class = processing_class
        self.state = TrainerState(log_history=[])
        self.control = TrainerControl()
        self.evaluations: list[dict[str, float]] = []
        """Of every evaluation: its metrics and its step."""
        self._steps_per_epoch = steps_per_epoch
        self._updates_per_step = updates_per_step
        self._max_updates = max_updates
        self._last_step = 0
        self._saved: tuple[int, str] | None = None
        self._fire("on_init_end")

    def add(self, callback: Any) -> None:
        """As Trainer.add_callback."""
        self.callbacks.append(_made(callback))

    @property
    def step(self) -> int:
        """Of the loop."""
        step: int = math.ceil(self.state.global_step / self._updates_per_step)
        return step

    def on_begin(self, step: int, last_step: int, folder: Path) -> None:
        state, args = self.state, self.args
        self._last_step = last_step
        state.max_steps = self._updates(last_step)
        state.logging_steps = args.logging_steps
        state.eval_steps = args.eval_steps or 0
        state.save_steps = args.save_steps
        state.num_train_epochs = math.ceil(self._epoch(last_step))
        self.control.should_training_stop = False
        self._at(step)
        self._fire("on_train_begin")
        self._fire("on_epoch_begin")
        self._fire("on_step_begin")

    def on_step(self, step: int, metrics: Metrics) -> Wishes:
        self._at(step)
        self._fire("on_step_end")
        if self.control.should_log or self._log_is_due(step):
            self._log(metrics)
        new_epoch = math.floor(self._epoch(step)) > math.floor(self._epoch(step - 1))
        if new_epoch or step == self._last_step:
            self._fire("on_epoch_end")
        wishes = self._take_wishes()
        if not wishes.stop and step < self._last_step:
            if new_epoch:
                self._fire("on_epoch_begin")
            self._fire("on_step_begin")
        return wishes

    def on_evaluate(self, step: int, metrics: Metrics) -> Wishes:
        self._at(step)
        named = self._with_loss(evaluation_metrics(metrics))
        self.evaluations.append({**named, "step": self.state.global_step})
        self._log(named)
        self._fire("on_evaluate", metrics=named)
        # As in transformers, callbacks compare with the best of the evaluations before this one.
        improved = self._keep_best(named)
        wishes = self._take_wishes()
        save_best = improved and str(getattr(self.args.save_strategy, "value", "")) == "best"
        return wishes | Wishes(save=save_best)

    def on_save(self, step: int, checkpoint: Path) -> Path | None:
        """The best by metric_for_best_model, which is not always the mean score that the loop keeps by."""
        self._at(step)
        self._saved = (self.state.global_step, str(checkpoint))
        self._note_best_checkpoint()
        self._fire("on_save")
        own = {type(c).__name__: c.state() for c in self.callbacks if isinstance(c, ExportableState)}
        self.state.stateful_callbacks.update(own)
        state = json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True)
        write_atomically(checkpoint / TRAINER_FILE, state)
        best = self.state.best_model_checkpoint
        return None if best is None else Path(best)

    def load(self, checkpoint: Path) -> None:
        """Go on as on_save left it: the history, the best metric, and what stateful callbacks had counted."""
        file = checkpoint / TRAINER_FILE
        if not file.is_file():
            raise BadInputError(f"{file}: is not there: no checkpoint of a trainer. Choose another.")
        # In place, because reward functions were given this object.
        try:
            vars(self.state).update(vars(TrainerState.load_from_json(str(file))))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{file}: is damaged: {error}. Choose another checkpoint.") from error
        for callback in self.callbacks:
            if isinstance(callback, ExportableState):
                saved = self.state.stateful_callbacks.get(type(callback).__name__, callback.state())
                for name, value in saved["attributes"].items():
                    setattr(callback, name, value)

    def on_end(self, step: int) -> None:
        self._at(step)
        self._fire("on_train_end")

    def _at(self, step: int) -> None:
        self.state.global_step = self._updates(step)
        self.state.epoch = self._epoch(step)

    def _updates(self, step: int) -> int:
        """Made by the end of so many steps of the loop."""
        updates = step * self._updates_per_step
        return updates if self._max_updates is None else min(updates, self._max_updates)

    def _epoch(self, step: int) -> float:
        return step / self._steps_per_epoch if self._steps_per_epoch else 0.0

    def _log_is_due(self, step: int) -> bool:
        strategy = self.args.logging_strategy.value
        if strategy == "no":
            return False
        if step == self._last_step or (self.args.logging_first_step and step == 1):
            return True
        if strategy == "epoch":
            return math.floor(self._epoch(step)) > math.floor(self._epoch(step - 1))
        every = _every(self.args.logging_steps, self._updates(self._last_step))
        return self._updates(step) // every > self._updates(step - 1) // every

    def _log(self, metrics: Metrics) -> None:
        logs = {name: value for name, value in metrics.items() if value is not None}
        if self._steps_per_epoch:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._fire("on_log", logs=logs)
        self.control.should_log = False

    def _with_loss(self, named: dict[str, float]) -> dict[str, float]:
        """Where the best is asked for by the loss, and the evaluation has none: minus the mean score."""
        metric = self.args.metric_for_best_model
        wanted = metric is not None and best_metric_name(metric) == "eval_loss"
        if wanted and "eval_loss" not in named and "eval_score_mean" in named:
            named["eval_loss"] = -named["eval_score_mean"]
        return named

    def _keep_best(self, named: Mapping[str, float]) -> bool:
        if self.args.metric_for_best_model is None:
            return False
        name = best_metric_name(self.args.metric_for_best_model)
        if name not in named:
            known = ", ".join(key.removeprefix("eval_") for key in named if key.startswith("eval_"))
            raise BadInputError(
                f"metric_for_best_model={self.args.metric_for_best_model!r}: the evaluation has no such "
                f"metric, but: {known}."
            )
        value, best = named[name], self.state.best_metric
        if best is not None and not (value > best if self.args.greater_is_better else value < best):
            return False
        self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        self._note_best_checkpoint()
        return True

    def _note_best_checkpoint(self) -> None:
        """A step's checkpoint may come before or after its evaluation."""
        if self._saved is not None and self._saved[0] == self.state.best_global_step:
            self.state.best_model_checkpoint = self._saved[1]

    def _take_wishes(self) -> Wishes:
        control = self.control
        wishes = Wishes(control.should_training_stop, control.should_save, control.should_evaluate)
        control.should_save = control.should_evaluate = control.should_log = False
        return wishes

    def _fire(self, event: str, **extra: Any) -> None:
        for callback in self.callbacks:
            call: Callable[..., Any] = getattr(callback, event)
            answer = call(
                self.args,
                self.state,
                self.control,
                model=self.model,
                processing_class=self.processing_class,
                optimizer=None,
                lr_scheduler=None,
                train_dataloader=None,
                eval_dataloader=None,
                **extra,
            )
            if answer is not None:
                self.control = answer


def evaluation_metrics(metrics: Metrics) -> dict[str, float]:
    """Under both names, eval/NAME and eval_NAME, and the mean score as eval_reward too; without None."""
    known = {name: value for name, value in metrics.items() if value is not None}
    named = known | {
        f"eval_{name.removeprefix('eval/')}": value
        for name, value in known.items()
        if name.startswith("eval/")
    }
    if "eval_score_mean" in named:
        named["eval_reward"] = named["eval_score_mean"]
    return named


def is_evaluation_metric(metric: str) -> bool:
    """Whether evaluations of online training have it, under any of its spellings."""
    name = best_metric_name(metric).removeprefix("eval_")
    return name in EVALUATION_METRICS or name.startswith("pass@")


def best_metric_name(metric: str) -> str:
    """As transformers reads metric_for_best_model: with eval_ in front where it is missing."""
    plain = metric.removeprefix("eval/")
    return plain if plain.startswith("eval_") else f"eval_{plain}"


def _every(steps: float, total: int) -> int:
    """A number of steps, or below 1 a share of all."""
    return max(1, math.ceil(steps * total) if steps < 1 else int(steps))


def _made(callback: Any) -> TrainerCallback:
    made = callback() if isinstance(callback, type) else callback
    if not isinstance(made, TrainerCallback):
        raise BadInputError(
            f"callbacks: {callback!r:.60} is {type(made).__name__}, not a transformers TrainerCallback."
        )
    return made
