"""ORPO as a library (Hong et al. 2024): preference pairs in, a model trained without any reference out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.config.fit import ORPO
from rl_cluster.trainers.fixed_data.pair_rows import pair_rows
from rl_cluster.trainers.fixed_data.settings import FitSettings
from rl_cluster.trainers.fixed_data.trainer import FitTrainer, Rows


@dataclass
class ORPOConfig(FitSettings):
    """beta: weight of the odds-ratio term (λ of the paper; TRL calls it beta)."""

    learning_rate: float = 8e-6
    beta: float = 0.1


class ORPOTrainer(FitTrainer):
    """As DPOTrainer, without a reference model. train() returns lists loss, nll, odds_ratio_loss, accuracy,
    reward_margin; evaluate() eval_loss, eval_accuracy, eval_margin."""

    config: ORPOConfig
    config_class = ORPOConfig
    columns = {
        "loss": "train/loss",
        "nll": "train/nll",
        "odds_ratio_loss": "train/odds_ratio_loss",
        "accuracy": "train/accuracy",
        "reward_margin": "train/margin",
    }

    def _check(self) -> None:
        check_number("ORPOConfig.beta", self.config.beta, above=0.0)

    def _rows(self, owner: str, dataset: Any) -> Rows:
        return pair_rows(owner, dataset)

    def _objective(self, rows: Rows) -> ORPO:
        return ORPO(coef=float(self.config.beta))
