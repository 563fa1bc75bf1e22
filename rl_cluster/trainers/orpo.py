"""ORPO as a library (Hong et al. 2024): preference pairs in, a model trained without any reference out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.config.fit import ORPO
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fit_front import FitFront, FitHistory
from rl_cluster.trainers.fit_settings import FitSettings, check_settings
from rl_cluster.trainers.pair_rows import pair_rows

COLUMNS = {
    "loss": "train/loss",
    "nll": "train/nll",
    "odds_ratio_loss": "train/odds_ratio_loss",
    "accuracy": "train/accuracy",
    "reward_margin": "train/margin",
}
"""What train() returns -> the metric."""


@dataclass
class ORPOConfig(FitSettings):
    """beta: weight of the odds-ratio term (λ of the paper; TRL calls it beta)."""

    learning_rate: float = 8e-6
    beta: float = 0.1


class ORPOTrainer:
    """As DPOTrainer, without a reference model."""

    def __init__(
        self, config: ORPOConfig, model: Any = None, tokenizer: Any = None, callbacks: Sequence[Any] = ()
    ) -> None:
        if not isinstance(config, ORPOConfig):
            raise BadInputError(f"ORPOTrainer.config is {type(config).__name__}: give an ORPOConfig.")
        check_settings(config)
        check_number("ORPOConfig.beta", config.beta, above=0.0)
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
        """Lists loss, nll, odds_ratio_loss, accuracy, reward_margin. dataset: as for DPOTrainer.train."""
        rows = pair_rows("ORPOTrainer.train.dataset", dataset)
        held_out = None
        if eval_dataset is not None:
            held_out = pair_rows("ORPOTrainer.train.eval_dataset", eval_dataset)
        objective = ORPO(coef=float(self.config.beta))
        return self._front.run(objective, rows, held_out, COLUMNS, resume=resume_from_checkpoint)

    def evaluate(self, dataset: Any) -> dict[str, float | None]:
        """eval_loss, eval_accuracy, eval_margin of the model as it is now."""
        rows = pair_rows("ORPOTrainer.evaluate.dataset", dataset)
        metrics = self._front.measure(ORPO(coef=float(self.config.beta)), rows)
        return {f"eval_{name}": metrics[f"eval/{name}"] for name in ("loss", "accuracy", "margin")}

    def save_model(self, folder: str | Path) -> None:
        """The model and its tokenizer, as Hugging Face folders are."""
        self._front.save(folder)
