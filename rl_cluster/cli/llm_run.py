"""Flags of ppo, rloo and grpo in, the RunConfig that says the same out."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster.cli.llm_data import DataFile, find_data, require_column
from rl_cluster.cli.llm_flags import Flags
from rl_cluster.cli.llm_nested import COMMON, Place, model_folder, nested
from rl_cluster.config.algorithm import GRPO, PPO, RLOO
from rl_cluster.config.reading.load import apply_override, parse_config
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.run_folder.claim import make_room
from rl_cluster.trainers.fields import Table


def _by_file(flags: Flags, place: Place) -> None:
    """What is in the file, or in the environment, decides, too."""


def _prompts_per_step(flags: Flags, place: Place) -> int:
    return flags.batch_size * flags.gradient_accumulation


def _samples(flags: Flags, place: Place) -> int:
    given = flags.rl_num_generations
    return {"ppo": 1, "rloo": 2, "grpo": 4}[flags.trainer] if given is None else given


def _kl_coef(flags: Flags, place: Place) -> float | None:
    """The documented default of GRPO's is not that of the setting."""
    return 0.1 if flags.trainer == "grpo" and flags.rl_kl_coef is None else flags.rl_kl_coef


RUN: Table = {
    **COMMON,
    "warmup_ratio": ("optimizer.warmup_steps", _by_file),
    "max_steps": ("run.steps", _by_file),
    "batch_size": ("batch.prompts_per_step", _prompts_per_step),
    "rl_num_generations": ("batch.samples_per_prompt", _samples),
    "data_path": ("data.train.path", _by_file),
    "valid_split": ("data.train.eval_path", _by_file),
    "prompt_text_column": ("data.train.prompt_column", _by_file),
    "max_prompt_length": "data.max_prompt_tokens",
    "reward_model": ("rewards.scorers.0.path", _by_file),
    "reward_function": ("rewards.scorers.0.function", _by_file),
    "rl_kl_coef": ("algorithm.kl.coef", _kl_coef),
    "rl_clip_range": "algorithm.loss.clip_low algorithm.loss.clip_high",
    "rl_temperature": "rollout.temperature",
    "rl_top_k": "rollout.top_k",
    "rl_top_p": "rollout.top_p",
    "rl_max_new_tokens": "rollout.max_new_tokens",
    "rl_gamma": "algorithm.gamma",
    "rl_gae_lambda": "algorithm.lam",
    "rl_value_loss_coef": "algorithm.critic.value_coef",
    "rl_num_ppo_epochs": "algorithm.num_epochs",
    "rl_num_mini_batches": "algorithm.num_mini_batches",
    "missing_eos_penalty": "rewards.shaping.missing_eos_penalty",
    "num_workers": "rollout.num_workers",
}
"""Flag -> setting."""

ALGORITHMS = {"ppo": PPO(), "rloo": RLOO(), "grpo": GRPO()}
"""With the defaults of their settings."""


@dataclass(frozen=True)
class Prompts:
    """settings: where they come from. scorers: those that come with them."""

    settings: dict[str, Any]
    num_rows: int
    scorers: tuple[dict[str, Any], ...] = ()


def run_config(flags: Flags, overrides: Sequence[str], run_dir: Path) -> RunConfig:
    """What is not a file yet (an environment's prompts) goes below run_dir/start. Raises BadInputError."""
    assert flags.model is not None
    model = model_folder(flags.model)
    prompts = _prompts(flags, model, run_dir / "start")
    scorers = [*prompts.scorers, *_scorers(flags)]
    if not scorers:
        raise BadInputError(
            f"--trainer {flags.trainer}: nothing scores the responses. Give --reward-model FOLDER, "
            "--reward-function module:function, --answer-column COLUMN, --rl-env-type TYPE, or "
            "--rl-env-module and --rl-env-class."
        )
    place = Place(model, run_dir)
    steps = flags.max_steps
    if steps is None:
        usable = max(1, prompts.num_rows - (flags.held_out or 0))
        steps = math.ceil(usable * flags.epochs / _prompts_per_step(flags, place))
    made: dict[str, Any] = {
        **prompts.settings,
        **_loss(flags),
        "algorithm.name": flags.trainer,
        "run.steps": steps,
        "rewards.scorers": scorers,
    }
    if flags.held_out:
        made["eval.num_prompts"] = flags.held_out
    if flags.warmup_ratio is not None:
        epochs = flags.rl_num_ppo_epochs or ALGORITHMS[flags.trainer].num_epochs
        updates = steps * epochs * (flags.rl_num_mini_batches or 1)
        made["optimizer.warmup_steps"] = math.ceil(flags.warmup_ratio * updates)
    data = nested(RUN, flags, place, made)
    for override in overrides:
        data = apply_override(data, override)
    return parse_config(data, f"llm --trainer {flags.trainer}")


def _loss(flags: Flags) -> dict[str, Any]:
    kind = flags.rl_loss_type
    if kind is None:
        return {}
    from rl_cluster.trainers.grpo.run_config import LOSS_TYPES

    if kind not in LOSS_TYPES:
        raise BadInputError(f"--rl-loss-type {kind}: must be one of {', '.join(LOSS_TYPES)}.")
    loss, aggregation = LOSS_TYPES[kind]
    if loss == "cispo" and flags.rl_clip_range is not None:
        raise BadInputError(
            f"--rl-clip-range {flags.rl_clip_range:g}: with --rl-loss-type cispo a token's weight is at "
            "most 5 and has no lower bound; leave it out."
        )
    return {"algorithm.loss.kind": loss, "algorithm.loss.aggregation": aggregation}


def _scorers(flags: Flags) -> list[dict[str, Any]]:
    scorers: list[dict[str, Any]] = []
    if flags.reward_model is not None:
        scorers.append({"kind": "reward_model", "path": model_folder(flags.reward_model)})
    if flags.reward_function is not None:
        scorers.append({"kind": "function", "function": flags.reward_function})
    if flags.answer_column is not None:
        scorers.append({"kind": "exact_match", "answer_key": flags.answer_column})
    return scorers


def _prompts(flags: Flags, model: str, workspace: Path) -> Prompts:
    if (flags.rl_env_module is None) != (flags.rl_env_class is None):
        missing = "--rl-env-class" if flags.rl_env_class is None else "--rl-env-module"
        raise BadInputError(
            f"{missing}: is missing. An environment is named by --rl-env-module and --rl-env-class."
        )
    if flags.rl_env_module is not None:
        return _case_prompts(flags, model, workspace)
    for name in ("rl_env_config", "rl_reward_weights"):
        if flags.is_given(name) and flags.rl_env_type is None:
            raise BadInputError(f"--{name.replace('_', '-')}: configures --rl-env-type, which is not given.")
    file = find_data(flags.data_path, flags.train_split, workspace)
    column = require_column(file, flags.prompt_text_column or "prompt", "--prompt-text-column", "prompts")
    if flags.answer_column is not None:
        require_column(file, flags.answer_column, "--answer-column", "right answers")
    settings: dict[str, Any] = {
        "data.train.source": file.source,
        "data.train.path": file.path,
        "data.train.prompt_column": column,
    }
    if flags.valid_split is not None:
        place = flags.valid_split if Path(flags.valid_split).is_file() else flags.data_path
        evaluated = find_data(place, flags.valid_split, workspace, "--valid-split")
        settings["data.train.eval_path"] = evaluated.path
        settings["eval.num_prompts"] = evaluated.num_rows
    if flags.rl_env_type is None:
        return Prompts(settings, file.num_rows)
    settings["rollout.environment"] = _environment(flags, model, file, column)
    return Prompts(settings, file.num_rows, ({"kind": "environment"},))


def _environment(flags: Flags, model: str, file: DataFile, column: str) -> dict[str, Any]:
    """rollout.environment; tried out here, so that bad settings are found before anything starts."""
    asked = {
        "rl_env_type": flags.rl_env_type,
        "rl_env_config": flags.rl_env_config,
        "rl_reward_weights": flags.rl_reward_weights,
        "rl_max_new_tokens": flags.rl_max_new_tokens,
        "rl_temperature": flags.rl_temperature,
    }
    options: dict[str, Any] = {
        "settings": {name: value for name, value in asked.items() if value is not None},
        "source": file.source,
        "path": str(Path(file.path).absolute()),
        "prompt_column": column,
    }
    from rl_cluster.assembly.train import load_tokenizer
    from rl_cluster.environments.playing.by_name import make_environment

    make_environment(load_tokenizer(model, bool(flags.trust_remote_code)), **options)
    return {"function": "rl_cluster.environments.playing.by_name:make_environment", "options": options}


def _case_prompts(flags: Flags, model: str, workspace: Path) -> Prompts:
    """The environment's own rows, and a scorer that makes the environment again where it scores."""
    for name in ("data_path", "valid_split", "prompt_text_column", "answer_column", "rl_env_type"):
        if flags.is_given(name):
            raise BadInputError(
                f"--{name.replace('_', '-')} {getattr(flags, name)}: the environment {flags.rl_env_class} "
                "brings its own prompts and rewards. Leave one of the two out."
            )
    from rl_cluster.assembly.train import load_tokenizer
    from rl_cluster.environments.playing.case_environment import load_case_environment
    from rl_cluster.environments.playing.for_runs import case_run

    # As `python -m` does: modules next to the user are importable, after everything installed.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    assert flags.rl_env_module is not None
    assert flags.rl_env_class is not None
    environment = load_case_environment(flags.rl_env_module, flags.rl_env_class)
    rows = case_run(environment, load_tokenizer(model, bool(flags.trust_remote_code))).rows
    path = make_room(workspace / "prompts.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    named = {"module": flags.rl_env_module, "class_name": flags.rl_env_class, "tokenizer": model}
    scorer = {
        "kind": "function",
        "function": "rl_cluster.environments.playing.by_name:score_cases",
        "name": flags.rl_env_class,
        "options": named,
    }
    settings = {"data.train.source": "jsonl", "data.train.path": str(path)}
    return Prompts(settings, len(rows), (scorer,))
