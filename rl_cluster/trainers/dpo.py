"""DPO as a library (Rafailov et al. 2023): preference pairs in, a policy that prefers the chosen out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from rl_cluster.checks import check_number
from rl_cluster.config.fit import DPO
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fit_front import FitFront, FitHistory
from rl_cluster.trainers.fit_settings import FitSettings, check_settings
from rl_cluster.trainers.pair_rows import from_lists, pair_rows
from rl_cluster.trainers.preference_dataset import PreferenceDataset

__all__ = ["DPOConfig", "DPOTrainer", "PreferenceDataset"]

COLUMNS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "reward_margin": "train/margin",
    "chosen_rewards": "train/chosen_rewards",
    "rejected_rewards": "train/rejected_rewards",
}
"""What train() returns -> the metric."""


@dataclass
class DPOConfig(FitSettings):
    """beta: strength of the tie to the reference. label_smoothing: probability that a label is wrong
    (conservative DPO). reference_free: the reference is taken to be uniform. loss_type: ipo is Azar et al.
    2023, hinge SLiC's."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    reference_free: bool = False
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"


class DPOTrainer:
    """DPOTrainer(config, tokenizer=…) loads config.model_name; DPOTrainer(config, model, tokenizer) does not.

    ref_model: what the policy is tied to, a model object or a folder; default: the policy as it starts.
    The attributes model, tokenizer and config are what was given; model is the trained one after training.
    """

    def __init__(
        self,
        config: DPOConfig,
        model: Any = None,
        tokenizer: Any = None,
        ref_model: Any = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        if not isinstance(config, DPOConfig):
            raise BadInputError(f"DPOTrainer.config is {type(config).__name__}: give a DPOConfig.")
        check_dpo(config)
        self.config = config
        self._front = FitFront(config, model, tokenizer, callbacks)
        self.ref_model = ref_model
        if ref_model is not None and not isinstance(ref_model, nn.Module | str | Path):
            raise BadInputError(
                f"DPOTrainer.ref_model is {type(ref_model).__name__} {ref_model!r:.60}: give a model of "
                "transformers, or a folder or hub name."
            )
        if ref_model is not None and config.reference_free:
            raise BadInputError("DPOTrainer.ref_model: is given together with DPOConfig.reference_free.")

    @property
    def model(self) -> Any:
        return self._front.model

    @property
    def tokenizer(self) -> Any:
        return self._front.tokenizer

    def train(
        self, dataset: Any, eval_dataset: Any = None, resume_from_checkpoint: str | Path | None = None
    ) -> FitHistory:
        """Lists loss, accuracy, reward_margin, chosen_rewards, rejected_rewards, one entry per step.

        dataset: a PreferenceDataset, or rows with prompt, chosen and rejected. eval_dataset is evaluated
        before, every eval_every steps and after (history.eval). resume_from_checkpoint: a run folder.
        """
        rows = pair_rows("DPOTrainer.train.dataset", dataset)
        held_out = None
        if eval_dataset is not None:
            held_out = pair_rows("DPOTrainer.train.eval_dataset", eval_dataset)
        return self._front.run(
            self._objective(),
            rows,
            held_out,
            COLUMNS,
            reference=self.ref_model,
            resume=resume_from_checkpoint,
        )

    def train_on_preferences(self, prompts: Any, chosen: Any = None, rejected: Any = None) -> Any:
        """(prompts, chosen, rejected), lists of texts, or (data) as for train. Returns the trained model."""
        if chosen is None and rejected is None:
            return self.train(prompts).model
        rows = from_lists("DPOTrainer.train_on_preferences", prompts, chosen, rejected)
        return self.train(rows).model

    def evaluate(self, dataset: Any) -> dict[str, float | None]:
        """eval_loss, eval_accuracy, eval_margin of the model as it is now.

        The reference is ref_model, or where the last training began; before any, the model itself.
        """
        rows = pair_rows("DPOTrainer.evaluate.dataset", dataset)
        metrics = self._front.measure(self._objective(), rows, reference=self.ref_model)
        return {f"eval_{name}": metrics[f"eval/{name}"] for name in ("loss", "accuracy", "margin")}

    def save_model(self, folder: str | Path) -> None:
        """The model and its tokenizer, as Hugging Face folders are."""
        self._front.save(folder)

    def _objective(self) -> DPO:
        config = self.config
        return DPO(
            beta=float(config.beta),
            loss=config.loss_type,
            label_smoothing=float(config.label_smoothing),
            reference_free=config.reference_free,
        )


def check_dpo(config: DPOConfig) -> None:
    """BadInputError that names the first wrong field."""
    check_settings(config)
    check_number("DPOConfig.beta", config.beta, above=0.0)
    check_number("DPOConfig.label_smoothing", config.label_smoothing, at_least=0.0)
    if config.label_smoothing >= 0.5:
        raise BadInputError(
            f"DPOConfig.label_smoothing={config.label_smoothing}: must be below 0.5; at 0.5 the labels say "
            "nothing."
        )
    if config.loss_type not in ("sigmoid", "ipo", "hinge"):
        raise BadInputError(f"DPOConfig.loss_type={config.loss_type!r}: must be 'sigmoid', 'ipo' or 'hinge'.")
