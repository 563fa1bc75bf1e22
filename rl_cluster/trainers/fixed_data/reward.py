"""Reward models on the learner: preference pairs in, a sequence-classification checkpoint out.

The checkpoint is what transformers' AutoModelForSequenceClassification loads and what a run's scorer of kind
reward_model reads. For heads of your own on any base, in this process, see rl_cluster.reward_models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.config.fit import RewardObjective
from rl_cluster.trainers.fixed_data.pair_rows import NEEDED, table_rows
from rl_cluster.trainers.fixed_data.settings import FitSettings
from rl_cluster.trainers.fixed_data.trainer import FitTrainer, Rows


@dataclass
class RewardConfig(FitSettings):
    """margin: by how much the chosen score must win. center_rewards_coefficient: weight of
    (r_chosen + r_rejected)², which keeps scores near 0 (Eisenstein et al. 2023)."""

    learning_rate: float = 1e-4
    margin: float = 0.0
    center_rewards_coefficient: float = 0.0


class RewardTrainer(FitTrainer):
    """On rows with chosen and rejected, and prompt where there is one. model: a causal language model, whose
    trunk gets a fresh head, or a sequence classifier with one label; after training, `model` is the sequence
    classifier. train() returns lists loss, accuracy, reward_margin, chosen_rewards, rejected_rewards;
    evaluate() eval_loss, eval_accuracy, eval_margin."""

    config: RewardConfig
    config_class = RewardConfig
    columns = {
        "loss": "train/loss",
        "accuracy": "train/accuracy",
        "reward_margin": "train/margin",
        "chosen_rewards": "train/chosen_rewards",
        "rejected_rewards": "train/rejected_rewards",
    }

    def _check(self) -> None:
        for name in ("margin", "center_rewards_coefficient"):
            check_number(f"RewardConfig.{name}", getattr(self.config, name), at_least=0.0)

    def _rows(self, owner: str, dataset: Any) -> Rows:
        return table_rows(owner, dataset, NEEDED)

    def _objective(self, rows: Rows) -> RewardObjective:
        config = self.config
        return RewardObjective(margin=float(config.margin), centre=float(config.center_rewards_coefficient))

    def _trained(self, folder: Path) -> Any:
        """The caller's own model may be of another class, and stays as it was."""
        if isinstance(self.model, str):
            return str(folder)
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto")
