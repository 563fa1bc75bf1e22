"""What users of RLOOTrainer and GRPOTrainer see in common: train, evaluate, save_model, state, close."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from transformers.trainer_utils import TrainOutput

from rl_cluster.data.handed_over import read_prompts
from rl_cluster.errors import BadInputError
from rl_cluster.run_folder.card import write_trainer_card
from rl_cluster.trainers.callbacks import CallbackHooks
from rl_cluster.trainers.online_run import OnlineRun
from rl_cluster.trajectory import Prompt


class OnlineTrainer:
    """args: the user's configuration. room: tokens that a prompt may have; None: no limit is known."""

    def __init__(self, args: Any, run: OnlineRun, hooks: CallbackHooks, room: int | None) -> None:
        self.args = args
        self.processing_class = run.parts.tokenizer
        self._run = run
        self._hooks = hooks
        self._room = room

    @property
    def model(self) -> Any:
        """The policy; after train() with the trained weights."""
        return self._run.policy.module

    @property
    def state(self) -> Any:
        """transformers' TrainerState: global_step, log_history, best_metric …"""
        return self._hooks.state

    @property
    def config(self) -> Any:
        """The RunConfig that all this became."""
        return self._run.config

    def add_callback(self, callback: Any) -> None:
        self._hooks.add(callback)

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """All updates; then the policy object holds the trained weights. metrics: of the last step.

        resume_from_checkpoint: the folder of a run (True: args.output_dir) that was interrupted or shall have
        more updates; it goes on in place from its newest checkpoint, bit for bit, with the same data.
        """
        resume = self.args.output_dir if resume_from_checkpoint is True else resume_from_checkpoint
        last_eval = self._run.train(resume or None)
        return train_output(self._run.rows(), self.state.global_step, last_eval)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Completions of the evaluation prompts, scored; names as in state.log_history."""
        prompts = self._run.parts.held_out
        if eval_dataset is not None:
            prompts = self._read_eval(eval_dataset)
        if not prompts:
            raise BadInputError("evaluate: the trainer has no eval_dataset. Give one.")
        metrics = self._run.evaluate(prompts)
        self._hooks.on_evaluate(self._hooks.step, metrics)
        return {name: value for name, value in self._hooks.evaluations[-1].items() if name != "step"}

    def _read_eval(self, dataset: Any) -> tuple[Prompt, ...]:
        return read_prompts(dataset, self.processing_class, "eval_dataset", self._room)

    def save_model(self, output_dir: str | None = None) -> None:
        """Weights, tokenizer and card, as from_pretrained reads them; default: args.output_dir."""
        self._run.save_model(self.args.output_dir if output_dir is None else output_dir)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None
    ) -> None:
        """README.md in args.output_dir, after train(): the card tells of a run."""
        if not self._run.trained:
            raise BadInputError("create_model_card: there is no run to tell of yet. Call train() first.")
        write_trainer_card(
            self._run.config, self._run.folder, self._run.rows(), model_name, dataset_name, tags
        )

    def close(self) -> None:
        """End the workers; files and model stay."""
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def train_output(rows: Sequence[dict[str, Any]], step: int, last_eval: Any) -> TrainOutput:
    """training_loss: mean of loss/total_avg (with the KL and entropy terms of the loss) over the steps.

    metrics: the last step's and evaluation's.
    """
    losses = [row["loss/total_avg"] for row in rows if row.get("loss/total_avg") is not None]
    last = {name: value for name, value in (rows[-1] if rows else {}).items() if value is not None}
    mean = sum(losses) / len(losses) if losses else 0.0
    return TrainOutput(step, mean, {**last, **{k: v for k, v in last_eval.items() if v is not None}})
