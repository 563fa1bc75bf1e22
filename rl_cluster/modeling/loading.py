"""A folder or hub name goes in; a model of transformers with all its weights comes out, or a BadInputError.

transformers draws what a checkpoint lacks and skips what it has too much: a run would train something else
than its user named. So the report of each loading is an error unless it is empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from rl_cluster.errors import BadInputError
from rl_cluster.files.sealed_weights import changed_weights, spoilt_words
from rl_cluster.modeling.checkpoint_names import persistent_buffers

DERIVED = re.compile(r"(rotary_emb\.(inv_freq|original_inv_freq)|\.masked_bias|\.attn\.bias|position_ids)$")
"""Buffers that old checkpoints carry and today's models compute."""

SHOWN_KEYS = 4

LOADING_ERRORS = (
    *(OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError),
    SafetensorError,
    StrictDataclassError,
)
"""What transformers raises for configs and weights that it cannot make a model of."""

Keys = Callable[[nn.Module, str], bool]
"""(model, key) → whether that key may be missing, or may be too much."""


def load_whole(
    factory: Any,
    path: str | Path,
    *,
    where: str,
    may_lack: Keys | None = None,
    may_leave: Keys | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """factory.from_pretrained(path, **settings), its loading report and its weights examined.

    where: begins the messages with the setting and its value. may_lack, may_leave: keys that the checkpoint
    may lack, or have besides. Raises BadInputError naming the keys or the tensor that are wrong.
    """
    local = Path(path).expanduser()
    check_weights(local, where)
    # transformers prints the report that is an error here, and heads that may be missing.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, report = factory.from_pretrained(
            str(local if local.exists() else path), output_loading_info=True, **settings
        )
    except BadInputError:
        raise  # of a factory of ours
    except LOADING_ERRORS as error:
        raise BadInputError(f"{where} cannot be loaded: {_first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    if hasattr(model, "peft_config"):
        raise BadInputError(
            f"{where} holds an adapter (adapter_config.json) besides the model; merge it "
            "(model.merge_and_unload()), or give the base model's folder without it."
        )
    where = f"{where}, loaded as {type(model).__name__},"
    _check_report(where, model, report, may_lack, may_leave)
    check_finite(where, model)
    return model


def check_weights(folder: Path, where: str) -> None:
    """Raise BadInputError, begun by `where`, for weights of ours that are not as they were written."""
    try:
        changed = changed_weights(folder)
    except OSError as error:
        raise BadInputError(f"{where} cannot be read: {error}. Give another checkpoint.") from error
    if changed:
        raise BadInputError(f"{where} is spoilt: {spoilt_words(folder, changed)}.")


def outside_the_trunk(model: nn.Module, key: str) -> bool:
    """Whether the key is no part of the model's trunk (which may be all of it) nor of a head that it has, but
    of another head: what a model without that head may leave aside."""
    prefix = getattr(model, "base_model_prefix", "")
    trunk = getattr(model, prefix, model) if prefix else model
    first = key.split(".")[0]
    return first not in {prefix, *(name for part in (model, trunk) for name, _ in part.named_children())}


def check_finite(where: str, model: nn.Module) -> None:
    """Raises BadInputError, begun by `where`, naming the first tensor that holds NaN or an infinity."""
    for name, tensor in _weights(model):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BadInputError(
                f"{where} holds numbers that are not finite in {name}; its training diverged or the file is "
                "damaged. Give another checkpoint."
            )


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from persistent_buffers(model)


def _check_report(
    where: str, model: nn.Module, report: dict[str, Any], may_lack: Keys | None, may_leave: Keys | None
) -> None:
    problems = []
    missing = [key for key in report["missing_keys"] if not (may_lack and may_lack(model, key))]
    if missing:
        problems.append(f"lacks {_shown(missing)}")
    unexpected = [key for key in report["unexpected_keys"] if not (may_leave and may_leave(model, key))]
    unexpected = [key for key in unexpected if not DERIVED.search(key)]
    if unexpected:
        problems.append(f"holds {_shown(unexpected)}, which that architecture does not have")
    mismatched = [str(entry[0] if isinstance(entry, tuple) else entry) for entry in report["mismatched_keys"]]
    if mismatched:
        problems.append(f"holds another shape of {_shown(mismatched)}")
    problems += [str(message).strip().splitlines()[0] for message in report.get("error_msgs") or ()]
    if problems:
        raise BadInputError(
            f"{where} {'; '.join(problems)}. Missing weights would be random: give the config.json and the "
            "weight files of one and the same model."
        )


def _shown(keys: Collection[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - SHOWN_KEYS} more weights" if len(names) > SHOWN_KEYS else ""
    return ", ".join(names[:SHOWN_KEYS]) + more


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
