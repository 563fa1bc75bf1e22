"""Two configurations of one run in: which settings differ, and whether a resumed run may have them so.

One list for the command line and for the library. A setting that an override names may change more than one
that follows from the arguments of a trainer, where a difference is rather a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_cluster.config.fit import FitConfig
from rl_cluster.config.reading.load import apply_override
from rl_cluster.config.reading.problems import show
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError

MAY_CHANGE = (
    "run.steps",
    "run.epochs",
    "run.dir",
    "run.name",
    "eval.",
    "checkpoint.",
    "log.",
    "health.",
)
"""Settings, or sections of them, that every resumed run may have otherwise than before."""

MAY_BE_OVERRIDDEN = (
    "optimizer.learning_rate",
    "cluster.device",
    "cluster.colocate",
    "cluster.cpus_per_worker",
    "cluster.start_deadline_seconds",
    "cluster.num_",
    "cluster.gpu_memory_gib",
    "sync.",
    "batch.tokens_per_micro_batch",
    "batch.dynamic_sampling_limit",
    "rollout.num_workers",
    "rollout.max_concurrent_sequences",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_fraction",
    "rollout.deadline_seconds",
    "learner.deadline_seconds",
    "data.train.path",
    "data.train.eval_path",
    "data.path",
    "data.eval_path",
)
"""And these, where the user names them: how fast and where a run trains, and where its data lie now, which
are compared by what is in them."""

Changes = dict[str, tuple[Any, Any]]
"""Dotted name -> (before, now)."""


def changes(before: RunConfig | FitConfig, now: RunConfig | FitConfig) -> Changes:
    """Every setting that differs; None where one of the two has no such setting."""
    return _differences(*(config.model_dump(mode="json", by_alias=True) for config in (before, now)))


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Changes:
    old, new = _flat(before), _flat(now)
    return {
        name: (old.get(name), new.get(name))
        for name in {**old, **new}
        if (name in old, old.get(name)) != (name in new, new.get(name))
    }


def check_same_settings(before: RunConfig | FitConfig, now: RunConfig | FitConfig) -> None:
    """Raise BadInputError where a trainer's arguments would train otherwise than the run in now.run.dir."""
    for name, (old, new) in changes(before, now).items():
        if not _may(name, old, MAY_CHANGE):
            raise BadInputError(
                f"resume_from_checkpoint: {name} is {new!r} and was {old!r} in "
                f"{now.run.dir}. Resume with the settings of that run, or start a new run from its model."
            )


def check_overrides(
    before: RunConfig | FitConfig, now: RunConfig | FitConfig, force: bool = False
) -> Changes:
    """What has changed. Raises BadInputError for settings that change what the run means, unless `force`."""
    found = changes(before, now)
    if not force:
        _refuse(found, str(now.run.dir))
    return found


def check_override_words(before: RunConfig | FitConfig, overrides: Sequence[str], source: str) -> None:
    """As check_overrides for `key.path=value`, whether or not the outcome is a valid configuration."""
    old = before.model_dump(mode="json", by_alias=True)
    new = old
    for override in overrides:
        new = apply_override(new, override)
    _refuse(_differences(old, new), source)


def _may(name: str, old: Any, allowed: tuple[str, ...]) -> bool:
    # A run whose last batch was cut short cannot have the rest of its updates later.
    return name.startswith(allowed) or (name == "run.max_updates" and old is None)


def _refuse(found: Changes, source: str) -> None:
    allowed = (*MAY_CHANGE, *MAY_BE_OVERRIDDEN)
    refused = {name: change for name, change in found.items() if not _may(name, change[0], allowed)}
    if refused:
        raise BadInputError(
            f"{source}: a resumed run with other settings is another run: {describe_changes(refused)}. "
            "Leave these out, start a new run from its model, or, where you mean it, add --force-changes."
        )


def describe_changes(found: Mapping[str, tuple[Any, Any]]) -> str:
    """On one line, for the user."""
    return "; ".join(f"{name} = {show(new)} (was {show(old)})" for name, (old, new) in found.items())


def check_last_step(field: str, last_step: int, step: int) -> None:
    """Raise BadInputError where a run shall end before the checkpoint that it goes on from."""
    if last_step < step:
        raise BadInputError(
            f"{field} = {last_step}: the checkpoint is of step {step}, so there is nothing to train. Give at "
            f"least {step + 1}, or an earlier checkpoint (--step)."
        )


def _flat(data: Any, name: str = "") -> dict[str, Any]:
    """Dotted names -> values; entries of lists by their number."""
    if isinstance(data, list):
        data = dict(enumerate(data)) if any(isinstance(item, dict) for item in data) else data
    if not isinstance(data, dict) or not data:
        return {name: data}
    parts = [_flat(value, f"{name}.{key}" if name else str(key)) for key, value in data.items()]
    return {key: value for part in parts for key, value in part.items()}
