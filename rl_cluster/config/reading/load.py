"""A YAML file and `key.path=value` overrides in, a RunConfig (or FitConfig) out; and back to YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rl_cluster.config.base import Config
from rl_cluster.config.reading.explain import explain
from rl_cluster.config.reading.problems import nearest, refuse
from rl_cluster.config.reading.yaml_text import dump_yaml, parse_yaml
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError

C = TypeVar("C", bound=Config)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe of a run; see load_as."""
    return load_as(RunConfig, path, overrides)


def load_as(kind: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """Read a recipe, apply the overrides in order, and check every field.

    overrides: `key.path=value`, the value in YAML (`batch.prompts_per_step=4`, `model.lora={rank: 8}`,
    `rewards.scorers.0.weight=2`). Raises BadInputError that lists every wrong field at once.
    """
    data = read_mapping(Path(path))
    for override in overrides:
        data = apply_override(data, override)
    return parse_as(kind, data, source=str(path))


def read_mapping(path: Path) -> dict[str, Any]:
    """A recipe as plain data, unchecked. Raises BadInputError where it is no mapping."""
    data = parse_yaml(_read(path), str(path))
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: a configuration is a mapping of sections, not {type(data).__name__}.")
    return data


def parse_config(data: dict[str, Any], source: str = "") -> RunConfig:
    """The configuration of a run; see parse_as."""
    return parse_as(RunConfig, data, source)


def parse_as(kind: type[C], data: dict[str, Any], source: str = "") -> C:
    """Check plain data (as YAML gives it). Lists stand for tuples, whole numbers for floats."""
    try:
        text = json.dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInputError(f"{source or 'configuration'}: {error}.") from None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        refuse(explain(error, kind), source)
        raise AssertionError("pydantic reported an error without entries") from error


def dump_config(config: Config) -> str:
    """YAML with every default filled in; load_as reads it back to an equal configuration."""
    return dump_yaml(config.model_dump(mode="json", by_alias=True))


def apply_override(data: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `data` with one `key.path=value` applied."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise BadInputError(f"override {override!r} is not of the form key.path=value, such as run.seed=1.")
    value = parse_yaml(text, f"override {override!r}")
    result: dict[str, Any] = _set(data, parts, value, f"override {override!r}")
    return result


def with_settings(data: Mapping[str, Any], settings: Mapping[str, Any], owner: str = "") -> dict[str, Any]:
    """A copy of `data` with `{"dotted.name": value}` applied, each value as it is: None stays None, and "12"
    stays text. owner: whose settings they are, for messages."""
    made = dict(data)
    for name, value in settings.items():
        what = f"{owner}settings[{name!r}]"
        if not isinstance(name, str) or not all(name.split(".")):
            raise BadInputError(f"{what}: is no dotted name, such as run.seed.")
        made = _set(made, name.split("."), value, what)
    return made


def _set(node: Any, parts: list[str], value: Any, what: str) -> Any:
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if isinstance(node, list):
        if not head.isdigit() or int(head) >= len(node):
            raise BadInputError(f"{what}: {head!r} is not an entry of a list of {len(node)}; count from 0.")
        return [_set(n, rest, value, what) if i == int(head) else n for i, n in enumerate(node)]
    if node is None:
        node = {}
    if not isinstance(node, dict):
        raise BadInputError(f"{what}: {node!r} is a value and has no key {head!r}.")
    return {**node, head: _set(node.get(head), rest, value, what)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        folder = path.parent
        names = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
        close = nearest(path.name, names)
        hint = (
            f" Did you mean {folder / close}?"
            if close
            else f" In {folder}: {', '.join(names) or 'no recipe'}."
        )
        raise BadInputError(f"{path}: there is no such file.{hint}") from None
    except IsADirectoryError:
        raise BadInputError(f"{path} is a folder; give a YAML file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read: {error}.") from None
