"""Models, tokenizers and other arguments of RLOOTrainer and GRPOTrainer in; facts, or an error, out."""

from __future__ import annotations

from typing import Any

from rl_cluster.assembly.train import load_tokenizer
from rl_cluster.config.planning.model_shape import find_shape
from rl_cluster.config.run import ModelConfig
from rl_cluster.data.encode import special_tokens
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.load import check_model_path


def num_parameters(model: Any) -> int | None:
    """Of a module, or of a folder or hub name; None where a name tells nothing."""
    if not isinstance(model, str):
        result: int | None = sum(weight.numel() for weight in model.parameters())
        return result
    shape = find_shape(ModelConfig(path=model))
    return None if shape is None else shape.num_parameters


def max_positions(model: Any) -> int | None:
    """Tokens that the model has room for; None where unknown."""
    if isinstance(model, str):
        shape = find_shape(ModelConfig(path=model))
        return None if shape is None else shape.max_positions
    return getattr(model.config, "max_position_embeddings", None)


def check_policy(model: Any, field: str) -> None:
    """BadInputError unless model is a folder or hub name, or a transformers causal language model."""
    if isinstance(model, str):
        check_model_path(model)
        return
    usable = all(
        callable(getattr(model, name, None)) for name in ("save_pretrained", "generate", "parameters")
    )
    if not usable or not hasattr(model, "config") or isinstance(model, type):
        raise BadInputError(
            f"{field} is {type(model).__name__} {model!r:.40}: give a transformers causal language model, or "
            "the folder or hub name of one."
        )
    if hasattr(model, "peft_config"):
        raise BadInputError(
            f"{field} has adapters already. Merge them (merge_and_unload), or give the base model and a "
            "peft_config."
        )


def check_tokenizer(tokenizer: Any, model: Any, field: str = "processing_class") -> Any:
    """The tokenizer, or for None that of the model's folder. BadInputError for what is none."""
    if tokenizer is None:
        path = model if isinstance(model, str) else getattr(model, "name_or_path", "")
        if not path:
            raise BadInputError(
                f"{field}=None: the model has no folder that a tokenizer could be loaded from."
            )
        return load_tokenizer(path, trust_remote_code=False)
    if not callable(tokenizer) or not hasattr(tokenizer, "eos_token_id") or isinstance(tokenizer, type):
        raise BadInputError(f"{field} is {type(tokenizer).__name__} {tokenizer!r:.40}: give a tokenizer.")
    special_tokens(tokenizer)
    return tokenizer


def check_no_optimizers(optimizers: Any) -> None:
    """BadInputError for an optimizer object: the optimizer lives in the learner."""
    if optimizers is not None and any(entry is not None for entry in optimizers):
        raise BadInputError(
            "optimizers: the optimizer lives with the learner, where an object of yours has no parameters. "
            "Use learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon, lr_scheduler_type and "
            "warmup_steps."
        )


def check_collator(collator: Any) -> None:
    """Padding is harmless and needless; anything else would be left out, so it is refused."""
    if collator is not None and type(collator).__name__ != "DataCollatorWithPadding":
        raise BadInputError(
            f"data_collator={type(collator).__name__}: rows are not collated here. Prepare them in "
            "train_dataset."
        )


def prompt_room(model: Any, field: str, response_length: int) -> int | None:
    """Tokens that a prompt may have beside the response; None where the model's limit is unknown."""
    positions = max_positions(model)
    if positions is not None and positions <= response_length:
        raise BadInputError(
            f"{field}={response_length}: the model has {positions} positions, which leaves none for "
            "a prompt. Lower it."
        )
    return None if positions is None else positions - response_length
