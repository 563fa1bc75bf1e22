"""Flags of sft, reward, dpo, orpo and kto in, the FitConfig that says the same out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_cluster.cli.llm_data import DataFile, find_data, require_column
from rl_cluster.cli.llm_flags import ACTS_FOR, Flags, flag_name
from rl_cluster.cli.llm_labels import has_labels_only, pairs_from_labels
from rl_cluster.cli.llm_nested import COMMON, Place, model_folder, nested
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.reading.load import apply_override, parse_as
from rl_cluster.errors import BadInputError
from rl_cluster.trainers.fields import Table


def _by_file(flags: Flags, place: Place) -> None:
    """What is in the file decides, too: see COLUMNS."""


FIT: Table = {
    **COMMON,
    "dpo_beta": "objective.beta",
    "dpo_loss": "objective.loss",
    "label_smoothing": "objective.label_smoothing",
    "reference_free": "objective.reference_free",
    "orpo_coef": "objective.coef",
    "kto_beta": "objective.beta",
    "desirable_weight": "objective.desirable_weight",
    "undesirable_weight": "objective.undesirable_weight",
    "model_ref": (
        "objective.reference_model",
        lambda flags, _: None if flags.model_ref is None else model_folder(flags.model_ref),
    ),
    "model_max_length": "data.max_length",
    "max_prompt_length": "data.max_prompt_length",
    "max_steps": "run.steps",
    "epochs": "run.epochs",
    "warmup_ratio": "warmup_ratio",
    "batch_size": ("batch.rows_per_step", lambda flags, _: flags.batch_size * flags.gradient_accumulation),
    "margin_column": "data.margin_column",
    "data_path": ("data.path", _by_file),
    "valid_split": ("data.eval_path", _by_file),
    "prompt_text_column": ("data.prompt_column", _by_file),
    "rejected_text_column": ("data.rejected_column", _by_file),
    "label_column": ("data.label_column", _by_file),
    "messages_column": ("data.messages_column", _by_file),
}
"""Flag -> setting."""


def fit_config(flags: Flags, overrides: Sequence[str], run_dir: Path) -> FitConfig:
    """Data sets of the hub and pairs made of labels are written below run_dir/start. Raises BadInputError."""
    if flags.eval_steps and flags.valid_split is None and not flags.held_out:
        raise BadInputError(
            f"--eval-steps {flags.eval_steps}: there is nothing to evaluate on. Add --valid-split or "
            "--held-out."
        )
    workspace = run_dir / "start"
    file = find_data(flags.data_path, flags.train_split, workspace)
    columns = COLUMNS[flags.trainer](flags, file)
    if flags.trainer == "reward" and has_labels_only(flags, file):
        file, columns = pairs_from_labels(flags, file, workspace), {}
    held_out = None
    if flags.valid_split is not None:
        place = flags.valid_split if Path(flags.valid_split).is_file() else flags.data_path
        held_out = find_data(place, flags.valid_split, workspace, "--valid-split").path
    assert flags.model is not None
    # Of the preference flags only those of the trainer are given; kto_beta and dpo_beta are one setting.
    table = {name: rule for name, rule in FIT.items() if flags.trainer in ACTS_FOR[name]}
    data_settings = {
        "objective.name": flags.trainer,
        "data.source": file.source,
        "data.path": file.path,
        "data.eval_path": held_out,
    }
    data = nested(table, flags, Place(model_folder(flags.model), run_dir), columns, data_settings)
    for override in overrides:
        data = apply_override(data, override)
    return parse_as(FitConfig, data, f"llm --trainer {flags.trainer}")


def _sft_columns(flags: Flags, file: DataFile) -> dict[str, Any]:
    """Chats, prompts with answers, or whole texts: by the flags, else by the columns that are there."""
    prompt, text = flags.prompt_text_column or "prompt", flags.text_column
    messages = flags.messages_column or "messages"
    by_default = text is None and flags.prompt_text_column is None and messages in file.columns
    if flags.messages_column is not None or by_default:
        _only_one_kind(flags)
        require_column(file, messages, "--messages-column", "chats")
        return {"objective.rows": "messages", "data.messages_column": messages}
    completion = text or "completion"
    if prompt in file.columns and completion in file.columns:
        return {
            "objective.rows": "completion",
            "data.prompt_column": prompt,
            "data.completion_column": completion,
        }
    if flags.prompt_text_column is not None:
        require_column(file, prompt, "--prompt-text-column", "prompts")
        require_column(file, completion, "--text-column", "the answers to the prompts")
    if text is None and "text" not in file.columns:
        raise BadInputError(
            f"--data-path {file.path}: has the columns {', '.join(file.columns)}. sft reads messages "
            "(chats), prompt and completion, or text. Name yours with "
            "--messages-column, --prompt-text-column and --text-column."
        )
    column = require_column(file, text or "text", "--text-column", "whole texts")
    return {"objective.rows": "text", "data.text_column": column}


def _only_one_kind(flags: Flags) -> None:
    for name in ("prompt_text_column", "text_column"):
        if flags.is_given(name):
            raise BadInputError(
                f"{flag_name(name)} {getattr(flags, name)}: --messages-column {flags.messages_column} names "
                "whole chats. Leave one of the two out."
            )


def _pair_columns(flags: Flags, file: DataFile) -> dict[str, Any]:
    if flags.trainer == "reward" and has_labels_only(flags, file):
        if flags.margin_column is not None:
            raise BadInputError(
                f"--margin-column {flags.margin_column}: {file.path} has texts with labels, not pairs with "
                "margins. Leave it out."
            )
        return {}
    if flags.label_column is not None:
        raise BadInputError(
            f"--label-column {flags.label_column}: {file.path} is read as pairs. It needs a column "
            f"{flags.text_column or 'text'} (--text-column) beside the labels, and no rejected responses."
        )
    chosen, rejected = flags.text_column or "chosen", flags.rejected_text_column or "rejected"
    require_column(file, chosen, "--text-column", "the chosen responses")
    require_column(file, rejected, "--rejected-text-column", "the rejected responses")
    if flags.prompt_text_column is not None:
        require_column(file, flags.prompt_text_column, "--prompt-text-column", "prompts")
    if flags.margin_column is not None:
        require_column(file, flags.margin_column, "--margin-column", "margins")
    return {
        "data.prompt_column": flags.prompt_text_column,
        "data.chosen_column": chosen,
        "data.rejected_column": rejected,
    }


def _kto_columns(flags: Flags, file: DataFile) -> dict[str, Any]:
    default = "text" if "completion" not in file.columns and "text" in file.columns else "completion"
    return {
        "data.prompt_column": require_column(
            file, flags.prompt_text_column or "prompt", "--prompt-text-column", "prompts"
        ),
        "data.completion_column": require_column(
            file, flags.text_column or default, "--text-column", "the responses"
        ),
        "data.label_column": require_column(
            file, flags.label_column or "label", "--label-column", "whether a response is good"
        ),
    }


COLUMNS = {
    "sft": _sft_columns,
    "reward": _pair_columns,
    "dpo": _pair_columns,
    "orpo": _pair_columns,
    "kto": _kto_columns,
}
