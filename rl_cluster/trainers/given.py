"""Models, tokenizers and what else users hand to a front in; facts, files and weights, or an error, out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_cluster.assembly.train import load_tokenizer
from rl_cluster.config.planning.backend import choose_backend
from rl_cluster.config.planning.model_shape import find_shape
from rl_cluster.config.planning.rope import named_in, positions
from rl_cluster.config.run import ModelConfig
from rl_cluster.data.encode import special_tokens
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.load import check_model_path
from rl_cluster.modeling.loading import load_whole
from rl_cluster.trainers.same_model import check_comes_back
from rl_cluster.trainers.session import save_start

CAUSAL = ("save_pretrained", "generate", "parameters", "config")
"""What a causal language model of transformers has."""


class GivenModel:
    """A model object of the caller's, or a name of one, which is only loaded when it is looked at."""

    def __init__(self, source: Any, field: str = "model") -> None:
        """field: the argument, for messages."""
        self.source = source
        self._field = field
        self._folder = source
        self._module: Any = None if isinstance(source, str) else source

    @property
    def module(self) -> Any:
        """The object itself; one that was named is loaded now."""
        if self._module is None:
            from transformers import AutoModelForCausalLM

            where = f"{self._field}={self._folder!r}:"
            self._module = load_whole(AutoModelForCausalLM, self._folder, where=where)
        return self._module

    @property
    def is_loaded(self) -> bool:
        return self._module is not None

    @property
    def base(self) -> Any:
        """The model of transformers in it."""
        return self.module

    @property
    def known(self) -> Any:
        """What can be looked at without loading anything: the object, or its name."""
        return self.base if self.is_loaded else self.source

    def put_back(self, folder: Path) -> None:
        """The weights at `folder` into the object; one that was named is loaded from there when looked at."""
        if self._module is None:
            self._folder = str(folder)
        else:
            self._module = put_back(self._module, folder)


def saved(model: Any, run_dir: Path, tokenizer: Any, name: str) -> str:
    """The folder or hub name to load; an object is written into the run folder's start/NAME."""
    return model if isinstance(model, str) else str(save_start(run_dir, model, tokenizer, name))


def put_back(model: Any, folder: Path) -> Any:
    """Load the weights at `folder` into `model`, in place, in its own dtype and on its own device.

    folder: an export: whole weights, or an adapter, which is then put around the model. Returns the model to
    use from now on: `model` itself, or the PeftModel around it.
    """
    if (folder / "adapter_config.json").is_file():
        from peft import PeftModel

        return PeftModel.from_pretrained(model, str(folder))
    fresh = load_whole(type(model), folder, where=f"model={str(folder)!r}:", dtype="auto")
    model.load_state_dict(fresh.state_dict())
    return model


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
    return positions(named_in(model.config))


def checked_model(field: str, model: Any, what: str, remedy: str, needs: Sequence[str] = CAUSAL) -> Any:
    """The model, or its folder or hub name as text. BadInputError, which names `field`, for what lacks one of
    `needs`, and for adapters: merged, or made by `remedy`."""
    if isinstance(model, str | Path):
        return str(model)
    if hasattr(model, "peft_config"):
        raise BadInputError(
            f"{field} has adapters already. Merge them (model.merge_and_unload()), or give the base model "
            f"and {remedy}."
        )
    if isinstance(model, type) or not all(hasattr(model, name) for name in needs):
        raise BadInputError(
            f"{field} is {type(model).__name__} {model!r:.60}: give {what}, or the folder or hub name of one."
        )
    check_comes_back(field, model)
    return model


def checked_policy(field: str, model: Any) -> Any:
    """As checked_model, for RLOO and GRPO; a folder must be there."""
    model = checked_model(field, model, "a transformers causal language model", "a peft_config")
    if isinstance(model, str):
        check_model_path(model)
    return model


def is_tokenizer(value: Any) -> bool:
    named = hasattr(value, "decode") and hasattr(value, "eos_token_id")
    return callable(value) and named and not isinstance(value, type)


def checked_tokenizer(field: str, tokenizer: Any, model: Any) -> Any:
    """The tokenizer, or for None that of the model's folder. BadInputError for what is none."""
    if tokenizer is None:
        path = model if isinstance(model, str) else getattr(model, "name_or_path", "")
        if not path:
            raise BadInputError(
                f"{field}=None: the model has no folder that a tokenizer could be loaded from. Give one."
            )
        return load_tokenizer(path, trust_remote_code=False)
    if not is_tokenizer(tokenizer):
        raise BadInputError(
            f"{field} is {type(tokenizer).__name__} {tokenizer!r:.60}: give a tokenizer, such as "
            "AutoTokenizer.from_pretrained(model_name)."
        )
    special_tokens(tokenizer)
    return tokenizer


def backend_for(asked: Any, address: str | None, model: Any) -> str:
    """asked, or for auto: local for small models, unless a cluster is named."""
    return choose_backend("ray" if address is not None and asked == "auto" else asked, num_parameters(model))


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
