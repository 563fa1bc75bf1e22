"""DPO as a library (Rafailov et al. 2023): preference pairs in, a policy that prefers the chosen out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rl_cluster.checks import check_number
from rl_cluster.config.fit import DPO
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fields import check_switch
from rl_cluster.trainers.fixed_data.pair_rows import from_lists, pair_rows
from rl_cluster.trainers.fixed_data.preference_dataset import PreferenceDataset
from rl_cluster.trainers.fixed_data.settings import FitSettings
from rl_cluster.trainers.fixed_data.trainer import ReferenceTrainer, Rows

__all__ = ["DPOConfig", "DPOTrainer", "PreferenceDataset"]


@dataclass
class DPOConfig(FitSettings):
    """beta: strength of the tie to the reference. label_smoothing: probability that a label is wrong
    (conservative DPO; of the sigmoid loss). reference_free: the reference is taken to be uniform. loss_type:
    ipo is Azar et al. 2023, hinge SLiC's."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    reference_free: bool = False
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"


class DPOTrainer(ReferenceTrainer):
    """DPOTrainer(config, tokenizer=…) loads config.model_name; DPOTrainer(config, model, tokenizer) does not.

    ref_model: what the policy is tied to, a model object or a folder; default: the policy as it starts. Data
    sets are a PreferenceDataset, or rows with prompt, chosen and rejected. train() returns lists loss,
    accuracy, reward_margin, chosen_rewards, rejected_rewards; evaluate() eval_loss, eval_accuracy,
    eval_margin.
    """

    config: DPOConfig
    config_class = DPOConfig
    columns = {
        "loss": "train/loss",
        "accuracy": "train/accuracy",
        "reward_margin": "train/margin",
        "chosen_rewards": "train/chosen_rewards",
        "rejected_rewards": "train/rejected_rewards",
    }

    def train_on_preferences(self, prompts: Any, chosen: Any = None, rejected: Any = None) -> Any:
        """(prompts, chosen, rejected), lists of texts, or (data) as for train. Returns the trained model."""
        if chosen is None and rejected is None:
            return self.train(prompts).model
        rows = from_lists("DPOTrainer.train_on_preferences", prompts, chosen, rejected)
        return self.train(rows).model

    def _check(self) -> None:
        config, reference = self.config, self.ref_model
        check_number("DPOConfig.beta", config.beta, above=0.0)
        check_number("DPOConfig.label_smoothing", config.label_smoothing, at_least=0.0)
        if config.label_smoothing >= 0.5:
            raise BadInputError(
                f"DPOConfig.label_smoothing={config.label_smoothing}: must be below 0.5; at 0.5 the labels "
                "say nothing."
            )
        if config.loss_type not in ("sigmoid", "ipo", "hinge"):
            raise BadInputError(
                f"DPOConfig.loss_type={config.loss_type!r}: must be 'sigmoid', 'ipo' or 'hinge'."
            )
        if config.label_smoothing and config.loss_type != "sigmoid":
            raise BadInputError(
                f"DPOConfig.label_smoothing={config.label_smoothing}: has no meaning for loss_type="
                f"{config.loss_type!r}. Set it to 0, or loss_type to 'sigmoid'."
            )
        check_switch("DPOConfig.reference_free", config.reference_free)
        if reference is not None and config.reference_free:
            raise BadInputError("DPOTrainer.ref_model: is given together with DPOConfig.reference_free.")

    def _rows(self, owner: str, dataset: Any) -> Rows:
        return pair_rows(owner, dataset)

    def _objective(self, rows: Rows) -> DPO:
        config = self.config
        return DPO(
            beta=float(config.beta),
            loss=config.loss_type,
            label_smoothing=float(config.label_smoothing),
            reference_free=config.reference_free,
        )
