"""Supervised fine-tuning as a library: texts, answered prompts or chats in, their imitator out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_cluster.config.fit import SFT
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fit_front import FitFront, FitHistory
from rl_cluster.trainers.fit_settings import FitSettings, check_settings
from rl_cluster.trainers.pair_rows import table_rows

COLUMNS = {"loss": "train/loss"}
"""What train() returns -> the metric: nats per trained token."""
KINDS: dict[str, tuple[str, ...]] = {
    "completion": ("prompt", "completion"),
    "messages": ("messages",),
    "text": ("text",),
}
"""Kind of rows -> the columns that they have."""


@dataclass
class SFTConfig(FitSettings):
    """completion_only_loss: prompts do not train (rows of text always train as a whole)."""

    learning_rate: float = 2e-5
    completion_only_loss: bool = True


class SFTTrainer:
    """As DPOTrainer, on strings, or rows with prompt and completion, with messages, or with text."""

    def __init__(
        self, config: SFTConfig, model: Any = None, tokenizer: Any = None, callbacks: Sequence[Any] = ()
    ) -> None:
        if not isinstance(config, SFTConfig):
            raise BadInputError(f"SFTTrainer.config is {type(config).__name__}: give an SFTConfig.")
        check_settings(config)
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
        """A list loss (nats per trained token); history.eval has the held-out loss."""
        kind, rows = demonstration_rows("SFTTrainer.train.dataset", dataset)
        held_out = None
        if eval_dataset is not None:
            eval_kind, held_out = demonstration_rows("SFTTrainer.train.eval_dataset", eval_dataset)
            if eval_kind != kind:
                raise BadInputError(
                    f"SFTTrainer.train.eval_dataset has {eval_kind} rows, the training data {kind} rows; "
                    "give both the same columns."
                )
        objective = self._objective(kind)
        return self._front.run(objective, rows, held_out, COLUMNS, resume=resume_from_checkpoint)

    def evaluate(self, dataset: Any) -> dict[str, float | None]:
        """eval_loss, nats per trained token."""
        kind, rows = demonstration_rows("SFTTrainer.evaluate.dataset", dataset)
        return {"eval_loss": self._front.measure(self._objective(kind), rows)["eval/loss"]}

    def save_model(self, folder: str | Path) -> None:
        """The model and its tokenizer, as Hugging Face folders are."""
        self._front.save(folder)

    def _objective(self, kind: Any) -> SFT:
        return SFT(rows=kind, train_on="completion" if self.config.completion_only_loss else "all")


def demonstration_rows(
    owner: str, data: Any
) -> tuple[Literal["completion", "messages", "text"], list[dict[str, Any]]]:
    """(kind, rows): strings become rows of text; the columns of the first row decide the kind."""
    if isinstance(data, Sequence) and not isinstance(data, str) and data and isinstance(data[0], str):
        return "text", [{"text": text} for text in data]
    rows = table_rows(owner, data, ())
    for kind, columns in KINDS.items():
        if all(rows[0].get(column) is not None for column in columns):
            return kind, table_rows(owner, rows, columns)  # type: ignore[return-value]
    raise BadInputError(
        f"{owner}[0]: has {', '.join(map(str, rows[0])) or 'no columns'}; prompt and completion, messages, "
        "or text are needed."
    )
