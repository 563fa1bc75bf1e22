"""KTO as a library (Ethayarajh et al. 2024): completions marked good or bad in, a better model out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.config.fit import KTO
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fit_front import FitFront, FitHistory
from rl_cluster.trainers.fit_settings import FitSettings, check_settings
from rl_cluster.trainers.pair_rows import table_rows

COLUMNS = {
    "loss": "train/loss",
    "kl": "train/kl_baseline",
    "accuracy": "train/accuracy",
    "chosen_rewards": "train/chosen_rewards",
    "rejected_rewards": "train/rejected_rewards",
    "reward_margin": "train/margin",
}
"""What train() returns -> the metric; None in a step without a row of that kind."""
NEEDED = ("prompt", "completion", "label")


@dataclass
class KTOConfig(FitSettings):
    """beta: strength of the tie to the reference. The weights balance good rows against bad ones where their
    numbers differ (desirable_weight × good : undesirable_weight × bad between 1 : 1 and 4 : 3)."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


class KTOTrainer:
    """As DPOTrainer, on rows of prompt, completion and label (True: a good completion)."""

    def __init__(
        self,
        config: KTOConfig,
        model: Any = None,
        tokenizer: Any = None,
        ref_model: Any = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        if not isinstance(config, KTOConfig):
            raise BadInputError(f"KTOTrainer.config is {type(config).__name__}: give a KTOConfig.")
        check_settings(config)
        check_number("KTOConfig.beta", config.beta, above=0.0)
        for name in ("desirable_weight", "undesirable_weight"):
            check_number(f"KTOConfig.{name}", getattr(config, name), at_least=0.0)
        self.config = config
        self.ref_model = ref_model
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
        """Lists loss, kl, accuracy, chosen_rewards, rejected_rewards, reward_margin."""
        rows = table_rows("KTOTrainer.train.dataset", dataset, NEEDED)
        held_out = None
        if eval_dataset is not None:
            held_out = table_rows("KTOTrainer.train.eval_dataset", eval_dataset, NEEDED)
        return self._front.run(
            self._objective(),
            rows,
            held_out,
            COLUMNS,
            reference=self.ref_model,
            resume=resume_from_checkpoint,
        )

    def evaluate(self, dataset: Any) -> dict[str, float | None]:
        """eval_loss, eval_accuracy, eval_margin of the model as it is now."""
        rows = table_rows("KTOTrainer.evaluate.dataset", dataset, NEEDED)
        metrics = self._front.measure(self._objective(), rows, reference=self.ref_model)
        return {f"eval_{name}": metrics.get(f"eval/{name}") for name in ("loss", "accuracy", "margin")}

    def save_model(self, folder: str | Path) -> None:
        """The model and its tokenizer, as Hugging Face folders are."""
        self._front.save(folder)

    def _objective(self) -> KTO:
        config = self.config
        return KTO(
            beta=float(config.beta),
            desirable_weight=float(config.desirable_weight),
            undesirable_weight=float(config.undesirable_weight),
        )
