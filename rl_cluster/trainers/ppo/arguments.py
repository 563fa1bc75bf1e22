"""The three documented constructors of PPOTrainer in; one checked set of arguments out.

PPOTrainer(config, tokenizer=, reward_fn=), PPOTrainer(config, model, tokenizer), and TRL's
PPOTrainer(config, model, ref_model, tokenizer, dataset): told apart by the types of what is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from rl_cluster.errors import BadInputError
from rl_cluster.trainers.given import checked_model, checked_tokenizer, is_tokenizer
from rl_cluster.trainers.ppo.checks import check_ppo_config
from rl_cluster.trainers.ppo.config import PPOConfig
from rl_cluster.trainers.ppo.model import PPOModel

ModelSource: TypeAlias = nn.Module | str
"""A model object (PPOModel included), or a folder or hub name."""


@dataclass(frozen=True)
class PPOArguments:
    """What a PPOTrainer is made of. ref_model None: the policy as it starts. tokenizer None: the model's."""

    config: PPOConfig
    model: ModelSource
    ref_model: ModelSource | None
    tokenizer: Any
    dataset: Any
    reward_fn: Any


def read_arguments(config: Any, positional: Sequence[Any], named: Mapping[str, Any]) -> PPOArguments:
    """named: model, ref_model, tokenizer, dataset, reward_fn, None where not given. Raises BadInputError."""
    check_ppo_config(config)
    values = dict(named)
    for name, value in _place(positional).items():
        if values.get(name) is not None:
            raise BadInputError(f"PPOTrainer.{name}: is given twice, by position and by name.")
        values[name] = value
    model = config.model_name if values["model"] is None else values["model"]
    if model is None:
        raise BadInputError("PPOTrainer.model: there is none. Give a model, or PPOConfig(model_name=...).")
    reference, tokenizer = values["ref_model"], values["tokenizer"]
    if tokenizer is not None:
        checked_tokenizer("PPOTrainer.tokenizer", tokenizer, None)
    if values["dataset"] is not None and not is_dataset(values["dataset"]):
        raise BadInputError(
            f"PPOTrainer.dataset is {type(values['dataset']).__name__} {values['dataset']!r:.60}: give a "
            "list or a data set whose items can be counted."
        )
    return PPOArguments(
        config=config,
        model=_checked("model", model),
        ref_model=None if reference is None else _checked("ref_model", reference),
        tokenizer=tokenizer,
        dataset=values["dataset"],
        reward_fn=values["reward_fn"],
    )


def _place(positional: Sequence[Any]) -> dict[str, Any]:
    """Names for what came by position after the configuration."""
    if not positional:
        return {}
    in_trl = len(positional) > 1 and (positional[1] is None or may_be_model(positional[1]))
    if not in_trl:
        names: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
            ("model", may_be_model, "a model"),
            ("tokenizer", is_tokenizer, "a tokenizer"),
            ("reward_fn", callable, "a reward function"),
        )
    else:
        names = (
            ("model", may_be_model, "a model"),
            ("ref_model", lambda value: value is None or may_be_model(value), "the reference model"),
            ("tokenizer", is_tokenizer, "a tokenizer"),
            ("dataset", lambda value: value is None or is_dataset(value), "a data set"),
        )
    if len(positional) > len(names):
        raise BadInputError(
            f"PPOTrainer: {len(positional)} arguments after the configuration; give what follows by name."
        )
    for number, (value, (name, fits, what)) in enumerate(zip(positional, names, strict=False), start=2):
        if not fits(value):
            raise BadInputError(
                f"PPOTrainer: argument {number} should be {what} ({name}) and is {type(value).__name__} "
                f"{value!r:.60}. The order is (config, model, tokenizer) or (config, model, ref_model, "
                "tokenizer, dataset); give arguments by name to be sure."
            )
    return {name: value for value, (name, _, _) in zip(positional, names, strict=False)}


def may_be_model(value: Any) -> bool:
    return isinstance(value, nn.Module | str | Path)


def is_dataset(value: Any) -> bool:
    countable = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return countable and not isinstance(value, str | bytes | Mapping) and not is_tokenizer(value)


def _checked(name: str, model: Any) -> ModelSource:
    """BadInputError unless it is a causal language model of transformers, a PPOModel, or names one."""
    field, what = f"PPOTrainer.{name}", "a causal language model of transformers, a PPOModel"
    base = model.base_model if isinstance(model, PPOModel) else model
    needs = ("save_pretrained", "get_output_embeddings", "get_decoder", "config")
    base = checked_model(field, base, what, 'PPOConfig(settings={"model.lora.rank": 16})', needs)
    if isinstance(base, str):
        return base
    if base.get_output_embeddings() is None:  # a trunk, whose class has the method
        checked_model(field, base, what, "", ("lm_head",))
    return model
