"""RLOO from a command line, with the flags of TRL's script of the same name.

    python examples/scripts/rloo/rloo.py --dataset_name NAME --model_name_or_path M --reward_model_path R \
        --output_dir models/rloo --learning_rate 3e-6 --total_episodes 10000 --missing_eos_penalty 1.0

NAME: a data set of the hub, or a folder with SPLIT.jsonl, whose rows have a column `prompt`. All fields of
RLOOConfig are flags. For long runs and several machines prefer `rl-cluster llm --trainer rloo` or a recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)

from rl_cluster import RLOOConfig, RLOOTrainer

EVAL_SAMPLES = 100
"""Rows kept for evaluation where no test split is named, at most a tenth of all."""


@dataclass
class ScriptArguments:
    dataset_name: str = field(metadata={"help": "A data set of the hub, or a folder with SPLIT.jsonl."})
    dataset_train_split: str = field(default="train", metadata={"help": "Rows to train on."})
    dataset_test_split: str | None = field(default=None, metadata={"help": "Rows to evaluate on."})


@dataclass
class ModelArguments:
    model_name_or_path: str = field(
        metadata={"help": "Whose tokenizer is used; the policy too, unless --sft_model_path names one."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the models."})


def read_split(name: str, split: str) -> Dataset:
    local = Path(name) / f"{split}.jsonl"
    if local.is_file():
        return load_dataset("json", data_files=str(local), split="train")
    return load_dataset(name, split=split)


def read_rows(asked: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """(to train on, to evaluate on), the prompts only; nothing is kept of fewer than ten rows."""
    train = read_split(asked.dataset_name, asked.dataset_train_split).select_columns(["prompt"])
    if asked.dataset_test_split is not None:
        return train, read_split(asked.dataset_name, asked.dataset_test_split).select_columns(["prompt"])
    kept = len(train) - min(EVAL_SAMPLES, len(train) // 10)
    return train.select(range(kept)), train.select(range(kept, len(train))) if kept < len(train) else None


def main(words: Sequence[str]) -> Any:
    """Train and save; returns the trainer, closed."""
    parser = HfArgumentParser((ScriptArguments, RLOOConfig, ModelArguments))  # type: ignore[arg-type]
    asked, config, models = parser.parse_args_into_dataclasses(list(words))
    trust = {"trust_remote_code": models.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(models.model_name_or_path, padding_side="left", **trust)
    named = any(word.partition("=")[0] == "--sft_model_path" for word in words)
    start = config.sft_model_path if named else models.model_name_or_path
    train, evaluation = read_rows(asked)
    trainer = RLOOTrainer(
        config=config,
        processing_class=tokenizer,
        policy=AutoModelForCausalLM.from_pretrained(start, **trust),
        ref_policy=AutoModelForCausalLM.from_pretrained(start, **trust),
        reward_model=AutoModelForSequenceClassification.from_pretrained(
            config.reward_model_path, num_labels=1, **trust
        ),
        train_dataset=train,
        eval_dataset=evaluation,
    )
    with trainer:
        trainer.train()
        trainer.save_model(config.output_dir)
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
