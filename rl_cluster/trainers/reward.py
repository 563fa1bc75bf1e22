"""Reward models on the learner: preference pairs in, a sequence-classification checkpoint out.

The checkpoint is what transformers' AutoModelForSequenceClassification loads and what a run's scorer of kind
reward_model reads. For heads of your own on any base, in this process, see rl_cluster.reward_models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.config.fit import RewardObjective
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fit_front import FitFront, FitHistory
from rl_cluster.trainers.fit_settings import FitSettings, check_settings
from rl_cluster.trainers.pair_rows import NEEDED, table_rows

COLUMNS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "reward_margin": "train/margin",
    "chosen_rewards": "train/chosen_rewards",
    "rejected_rewards": "train/rejected_rewards",
}
"""What train() returns -> the metric."""


@dataclass
class RewardConfig(FitSettings):
    """margin: by how much the chosen score must win. center_rewards_coefficient: weight of
    (r_chosen + r_rejected)², which keeps scores near 0 (Eisenstein et al. 2023)."""

    learning_rate: float = 1e-4
    margin: float = 0.0
    center_rewards_coefficient: float = 0.0


class RewardTrainer:
    """As DPOTrainer. model: a causal language model, whose trunk gets a fresh head, or a sequence classifier
    with one label. After training, `model` is the sequence classifier."""

    def __init__(
        self, config: RewardConfig, model: Any = None, tokenizer: Any = None, callbacks: Sequence[Any] = ()
    ) -> None:
        if not isinstance(config, RewardConfig):
            raise BadInputError(f"RewardTrainer.config is {type(config).__name__}: give a RewardConfig.")
        check_settings(config)
        check_number("RewardConfig.margin", config.margin, at_least=0.0)
        check_number(
            "RewardConfig.center_rewards_coefficient", config.center_rewards_coefficient, at_least=0.0
        )
        self.config = config
        self._front = FitFront(config, model, tokenizer, callbacks)

    @property
    def model(self) -> Any:
        return self._front.model

    @property
    def tokenizer(self) -> Any:
        return self._front.tokenizer

    def train(
        self, dataset: Any, eval_dataset: Any = None, resume_from_checkpoint: str | Path | None = None
    ) -> FitHistory:
        """Lists loss, accuracy, reward_margin, chosen_rewards, rejected_rewards.

        dataset: rows with chosen and rejected, and prompt where there is one.
        """
        rows = table_rows("RewardTrainer.train.dataset", dataset, NEEDED)
        held_out = None
        if eval_dataset is not None:
            held_out = table_rows("RewardTrainer.train.eval_dataset", eval_dataset, NEEDED)
        return self._front.run(
            self._objective(),
            rows,
            held_out,
            COLUMNS,
            resume=resume_from_checkpoint,
            loader=load_classifier,
        )

    def evaluate(self, dataset: Any) -> dict[str, float | None]:
        """eval_loss, eval_accuracy, eval_margin of the model as it is now."""
        rows = table_rows("RewardTrainer.evaluate.dataset", dataset, NEEDED)
        metrics = self._front.measure(self._objective(), rows)
        return {f"eval_{name}": metrics[f"eval/{name}"] for name in ("loss", "accuracy", "margin")}

    def save_model(self, folder: str | Path) -> None:
        """The model and its tokenizer, as Hugging Face folders are."""
        self._front.save(folder)

    def _objective(self) -> RewardObjective:
        config = self.config
        return RewardObjective(margin=float(config.margin), centre=float(config.center_rewards_coefficient))


def load_classifier(_model: Any, folder: Path) -> Any:
    """The trained classifier; the caller's own model may be of another class, and stays as it was."""
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto")
