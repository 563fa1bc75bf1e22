"""Supervised fine-tuning as a library: texts, answered prompts or chats in, their imitator out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl_cluster.config.fit import SFT
from rl_cluster.data.handed_over import read_rows
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fields import check_switch
from rl_cluster.trainers.fixed_data.settings import FitSettings
from rl_cluster.trainers.fixed_data.trainer import FitTrainer, Rows

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


class SFTTrainer(FitTrainer):
    """On strings, or rows with prompt and completion, with messages, or with text. train() returns a list
    loss, and evaluate() eval_loss: nats per trained token."""

    config: SFTConfig
    config_class = SFTConfig
    columns = {"loss": "train/loss"}
    evaluated = ("loss",)

    def _check(self) -> None:
        check_switch("SFTConfig.completion_only_loss", self.config.completion_only_loss)

    def _rows(self, owner: str, dataset: Any) -> Rows:
        return demonstration_rows(owner, dataset)

    def _objective(self, rows: Rows) -> SFT:
        train_on: Literal["completion", "all"] = "completion" if self.config.completion_only_loss else "all"
        return SFT(rows=kind_of(rows[0]), train_on=train_on)

    def _check_alike(self, rows: Rows, eval_rows: Rows) -> None:
        kind, eval_kind = kind_of(rows[0]), kind_of(eval_rows[0])
        if eval_kind != kind:
            raise BadInputError(
                f"SFTTrainer.train.eval_dataset has {eval_kind} rows, the training data {kind} rows; "
                "give both the same columns."
            )


def demonstration_rows(owner: str, data: Any) -> list[dict[str, Any]]:
    """Strings become rows of text; the columns of the first row decide which all rows must have."""
    rows = read_rows(data, owner, what="texts or of dicts", bare="text")
    kind = kind_of(rows[0])
    if kind is None:
        raise BadInputError(
            f"{owner}[0]: has {', '.join(map(str, rows[0])) or 'no columns'}; prompt and completion, "
            "messages, or text are needed."
        )
    return read_rows(rows, owner, needed=KINDS[kind])


def kind_of(row: Mapping[str, Any]) -> Any:
    """A key of KINDS, or None."""
    return next((kind for kind, names in KINDS.items() if all(row.get(n) is not None for n in names)), None)
