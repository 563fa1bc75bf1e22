"""A reward model and preferences in; the same model, trained in this process, and a history out."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch

from rl_cluster.checks import check_whole_number
from rl_cluster.errors import BadInputError, RLClusterError
from rl_cluster.reward_models.config import RewardModelConfig
from rl_cluster.reward_models.folder import load_weights, save_reward_model
from rl_cluster.reward_models.reward_model import RewardModel, evaluating, seeded
from rl_cluster.reward_models.texts import padding_tokenizer
from rl_cluster.reward_models.training_data import PreferencePairs, ScoredTexts, TrainingData

History = dict[str, list[float]]
"""One number per epoch under each name."""


class RewardModelTrainer:
    """Trains a RewardModel of any kind with AdamW in this process; no cluster is involved.

    config: its learning_rate, warmup_steps, gradient_accumulation_steps, max_grad_norm and seed act here.
    device: None: where the model is if that is an accelerator, else the GPU if there is one, else the CPU.
    `optimizer` and `scheduler` live as long as the trainer: a second call of train_… goes on from the first.
    The same seed gives the same history; PyTorch's global generator is left as it was.
    """

    def __init__(
        self, model: RewardModel, tokenizer: Any, config: RewardModelConfig, device: Any = None
    ) -> None:
        if not isinstance(model, RewardModel):
            raise BadInputError(
                f"model={type(model).__name__}: give a RewardModel; RewardModel(config) makes one."
            )
        if not isinstance(config, RewardModelConfig):
            raise BadInputError(f"config={config!r:.60}: give a RewardModelConfig.")
        padding_tokenizer(tokenizer)  # refuses now what could not be encoded later
        self.device = _device(model, device)
        self.model = model.to(self.device)
        self.tokenizer = tokenizer
        self.config = config
        self.num_epochs_done = 0
        self._reset_optimizer()

    def train_on_preferences(
        self,
        chosen_texts: Sequence[str],
        rejected_texts: Sequence[str],
        num_epochs: int = 3,
        batch_size: int = 8,
        max_length: int = 512,
    ) -> History:
        """−log σ(f(chosen, rejected)), averaged over pairs; text i of both lists make a pair.

        Returns per epoch: loss, accuracy (share of pairs on the right side) and margin (mean f), as they were
        while the weights moved, with dropout; learning_rate and grad_norm (before clipping) of its last
        update. The model is in training mode afterwards. Raises BadInputError for ragged, empty or wrongly
        typed lists.
        """
        check_whole_number("max_length", max_length)
        pairs = PreferencePairs(self.model, self.tokenizer, chosen_texts, rejected_texts, max_length)
        return self._train(pairs, num_epochs, batch_size)

    def train_on_targets(
        self,
        texts: Sequence[str],
        target_rewards: Any,
        objective_mask: Any = None,
        num_epochs: int = 3,
        batch_size: int = 8,
        max_length: int = 512,
    ) -> History:
        """The squared error of a MultiObjectiveRewardModel; see its compute_multi_objective_loss.

        target_rewards: [texts, objectives]; objective_mask: the same shape, or [objectives].
        """
        check_whole_number("max_length", max_length)
        scored = ScoredTexts(self.model, self.tokenizer, texts, target_rewards, objective_mask, max_length)
        return self._train(scored, num_epochs, batch_size)

    @torch.no_grad()
    def evaluate(
        self,
        chosen_texts: Sequence[str],
        rejected_texts: Sequence[str],
        batch_size: int = 8,
        max_length: int = 512,
    ) -> dict[str, float]:
        """eval_loss, eval_accuracy and eval_margin on other pairs, without dropout; trains nothing."""
        check_whole_number("batch_size", batch_size)
        check_whole_number("max_length", max_length)
        pairs = PreferencePairs(self.model, self.tokenizer, chosen_texts, rejected_texts, max_length)
        totals: dict[str, float] = {}
        with evaluating(self.model):
            for rows in _batches(np.arange(len(pairs)), batch_size):
                loss, means = pairs.loss(rows)
                for name, value in {"loss": loss.item(), **means}.items():
                    totals[name] = totals.get(name, 0.0) + value * len(rows)
        return {f"eval_{name}": total / len(pairs) for name, total in totals.items()}

    def save_model(self, path: str | PathLike[str]) -> None:
        """Write weights, config and tokenizer into a folder at `path`, which appears whole or not at all."""
        save_reward_model(self.model, self.tokenizer, path)

    def load_model(self, path: str | PathLike[str]) -> None:
        """Take the weights that save_model wrote; the optimizer and its warm-up start afresh.

        Raises BadInputError for a missing folder and for one of another model, and then changes nothing.
        """
        load_weights(self.model, path)
        self._reset_optimizer()

    def _reset_optimizer(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        steps = self.config.warmup_steps
        self.optimizer = torch.optim.AdamW(trained, lr=self.config.learning_rate, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: min(1.0, (done + 1) / max(1, steps))
        )

    def _train(self, data: TrainingData, num_epochs: int, batch_size: int) -> History:
        check_whole_number("num_epochs", num_epochs)
        check_whole_number("batch_size", batch_size)
        self.model.train()
        history: History = {}
        for _ in range(num_epochs):
            with seeded(self.config.seed + self.num_epochs_done):
                epoch = self._train_epoch(data, batch_size)
            self.num_epochs_done += 1
            for name, value in epoch.items():
                history.setdefault(name, []).append(value)
        return history

    def _train_epoch(self, data: TrainingData, batch_size: int) -> dict[str, float]:
        order = np.random.default_rng([self.config.seed, self.num_epochs_done]).permutation(len(data))
        batches = [rows for rows in _batches(order, batch_size) if data.weight(rows) > 0]
        per_update = self.config.gradient_accumulation_steps
        totals: dict[str, float] = {}
        last: dict[str, float] = {}
        # The last update of an epoch takes what is left, however few batches that are.
        for start in range(0, len(batches), per_update):
            group = batches[start : start + per_update]
            for name, value in self._accumulate(data, group).items():
                totals[name] = totals.get(name, 0.0) + value
            last = self._update()
        weight = sum(data.weight(rows) for rows in batches)
        return {name: total / weight for name, total in totals.items()} | last

    def _accumulate(self, data: TrainingData, group: Sequence[Sequence[int]]) -> dict[str, float]:
        """Gradients of the mean over all entries of the group's batches; sums of loss and other means."""
        self.optimizer.zero_grad(set_to_none=True)
        total = sum(data.weight(rows) for rows in group)
        sums: dict[str, float] = {}
        for rows in group:
            loss, means = data.loss(rows)
            if not bool(torch.isfinite(loss)):
                raise RLClusterError(
                    f"the loss is {loss.item()} in epoch {self.num_epochs_done + 1}; the weights are those "
                    "of the last update. Lower learning_rate, or set max_grad_norm."
                )
            weight = data.weight(rows)
            (loss * (weight / total)).backward()
            for name, value in {"loss": loss.item(), **means}.items():
                sums[name] = sums.get(name, 0.0) + value * weight
        return sums

    def _update(self) -> dict[str, float]:
        parameters = self.optimizer.param_groups[0]["params"]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm or float("inf"))
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        return {"learning_rate": learning_rate, "grad_norm": norm.item()}


def _batches(order: np.ndarray, batch_size: int) -> list[list[int]]:
    return [order[start : start + batch_size].tolist() for start in range(0, len(order), batch_size)]


def _device(model: RewardModel, device: Any) -> torch.device:
    if device is None:
        placed = model.reward_head[-1].weight.device
        return placed if placed.type != "cpu" or not torch.cuda.is_available() else torch.device("cuda")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise BadInputError(
            f"device={device!r}: cannot be used here ({str(error).splitlines()[0]}); use 'cpu', or None to "
            "choose."
        ) from error
    return chosen
