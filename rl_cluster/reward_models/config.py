"""What a reward model is and how it is trained, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_cluster.checks import check_number, check_whole_number
from rl_cluster.errors import BadInputError

PoolingStrategy = Literal["last", "mean", "cls"]
POOLING: tuple[PoolingStrategy, ...] = ("last", "mean", "cls")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class RewardModelConfig:
    """The fields of a RewardModel and of its trainer.

    model_name: folder or hub name of the base; may be None when the model is given a base_model.
    num_labels: rewards per text. pooling_strategy: which hidden state stands for a text: that of its last
    real token, the mean over its real tokens, or that of its first ("cls", for encoders only: a decoder's
    first token has seen nothing). dropout_prob: before each head. temperature: divides every reward.
    use_lora: only adapters (rank, scale alpha / rank, dropout) and heads train, on every linear layer.
    learning_rate, warmup_steps (updates of linear rise, constant after), gradient_accumulation_steps
    (batches per update), max_grad_norm (L2; None or 0 does not clip): the trainer's. seed: of heads,
    adapters, dropout and order. dtype: of a base that is loaded by name; heads stay in float32.

    Raises BadInputError for the first field that cannot work.
    """

    model_name: str | None = None
    num_labels: int = 1
    pooling_strategy: PoolingStrategy = "last"
    dropout_prob: float = 0.1
    temperature: float = 1.0
    use_lora: bool = False
    lora_rank: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.1
    learning_rate: float = 1e-4
    warmup_steps: int = 100
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = 1.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.model_name is not None and (not isinstance(self.model_name, str) or not self.model_name):
            raise BadInputError(
                f"RewardModelConfig.model_name={self.model_name!r}: give a model folder or hub name, or None "
                "and a base_model."
            )
        _check_choice("pooling_strategy", self.pooling_strategy, POOLING)
        _check_choice("dtype", self.dtype, DTYPES)
        if not isinstance(self.use_lora, bool):
            raise BadInputError(f"RewardModelConfig.use_lora={self.use_lora!r}: must be True or False.")
        for name in ("num_labels", "lora_rank", "gradient_accumulation_steps"):
            check_whole_number(f"RewardModelConfig.{name}", getattr(self, name))
        for name in ("warmup_steps", "seed"):
            check_whole_number(f"RewardModelConfig.{name}", getattr(self, name), at_least=0)
        for name in ("temperature", "lora_alpha", "learning_rate"):
            check_number(f"RewardModelConfig.{name}", getattr(self, name), above=0.0)
        if self.max_grad_norm is not None:
            check_number("RewardModelConfig.max_grad_norm", self.max_grad_norm, at_least=0.0)
        for name in ("dropout_prob", "lora_dropout"):
            check_number(f"RewardModelConfig.{name}", getattr(self, name), at_least=0.0)
            if getattr(self, name) >= 1:
                raise BadInputError(
                    f"RewardModelConfig.{name}={getattr(self, name)!r}: must be below 1; 0 is no dropout."
                )


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadInputError(f"RewardModelConfig.{name}={value!r}: must be one of {', '.join(allowed)}.")
