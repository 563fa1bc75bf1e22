"""KTO as a library (Ethayarajh et al. 2024): completions marked good or bad in, a better model out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.config.fit import KTO
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fixed_data.pair_rows import table_rows
from rl_cluster.trainers.fixed_data.settings import FitSettings
from rl_cluster.trainers.fixed_data.trainer import ReferenceTrainer, Rows

NEEDED = ("prompt", "completion", "label")


@dataclass
class KTOConfig(FitSettings):
    """beta: strength of the tie to the reference. The weights balance good rows against bad ones where their
    numbers differ (desirable_weight × good : undesirable_weight × bad between 1 : 1 and 4 : 3)."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


class KTOTrainer(ReferenceTrainer):
    """As DPOTrainer, on rows of prompt, completion and label (True: a good completion). train() returns lists
    loss, kl, accuracy, chosen_rewards, rejected_rewards, reward_margin, None in a step without a row of that
    kind; evaluate() eval_loss, eval_accuracy, eval_margin."""

    config: KTOConfig
    config_class = KTOConfig
    columns = {
        "loss": "train/loss",
        "kl": "train/kl_baseline",
        "accuracy": "train/accuracy",
        "chosen_rewards": "train/chosen_rewards",
        "rejected_rewards": "train/rejected_rewards",
        "reward_margin": "train/margin",
    }

    def _check(self) -> None:
        check_number("KTOConfig.beta", self.config.beta, above=0.0)
        for name in ("desirable_weight", "undesirable_weight"):
            check_number(f"KTOConfig.{name}", getattr(self.config, name), at_least=0.0)
        if self.config.desirable_weight == self.config.undesirable_weight == 0:
            raise BadInputError(
                "KTOConfig.desirable_weight=0: undesirable_weight is 0, too, so nothing would train. Give "
                "one of them a weight."
            )

    def _rows(self, owner: str, dataset: Any) -> Rows:
        return table_rows(owner, dataset, NEEDED)

    def _objective(self, rows: Rows) -> KTO:
        config = self.config
        return KTO(
            beta=float(config.beta),
            desirable_weight=float(config.desirable_weight),
            undesirable_weight=float(config.undesirable_weight),
        )
