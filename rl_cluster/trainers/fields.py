"""A front's flat fields in, dotted settings of a configuration out: by one table per front.

The front, the command line, the documentation and the test that every field acts read the same table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rl_cluster.checks import check_number, check_whole_number
from rl_cluster.errors import BadInputError


@dataclass(frozen=True)
class Elsewhere:
    """Of a field that sets nothing in the configuration by itself: what it does, in words."""

    what: str

    def __str__(self) -> str:
        return self.what


Make: TypeAlias = Callable[[Any, Any], Any]
Rule: TypeAlias = str | tuple[str, Make] | Mapping[str, Make] | Elsewhere
"""The dotted setting (or several, with blanks between) that takes the field's value, or that takes what a
function makes of (the front's configuration, further facts); or a function for each of several."""
Table: TypeAlias = Mapping[str, Rule]


def paths_of(rule: Rule) -> list[str]:
    """The settings that a rule fills; [] for Elsewhere."""
    if isinstance(rule, Elsewhere):
        return []
    if isinstance(rule, Mapping):
        return list(rule)
    return (rule if isinstance(rule, str) else rule[0]).split()


def settings_by(table: Table, config: Any, facts: Any = None) -> dict[str, Any]:
    """Dotted setting -> value."""
    settings: dict[str, Any] = {}
    for name, rule in table.items():
        if isinstance(rule, Mapping):
            settings |= {path: make(config, facts) for path, make in rule.items()}
        elif not isinstance(rule, Elsewhere):
            value = getattr(config, name) if isinstance(rule, str) else rule[1](config, facts)
            settings |= dict.fromkeys(paths_of(rule), value)
    return settings


def rows_of(table: Table) -> Iterator[tuple[str, str]]:
    """(field, what it sets), for the documentation."""
    for name, rule in table.items():
        yield name, ", ".join(f"`{path}`" for path in paths_of(rule)) or str(rule)


@dataclass(frozen=True)
class Range:
    """What numbers a field may have."""

    above: float = -math.inf
    at_least: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf
    whole: bool = False
    optional: bool = False

    def check(self, field: str, value: Any) -> None:
        if value is None and self.optional:
            return
        if self.whole:
            check_whole_number(field, value, at_least=int(self.at_least))
            return
        check_number(field, value, above=self.above, at_least=self.at_least)
        if value > self.at_most:
            raise BadInputError(f"{field}={value!r}: must be at most {self.at_most:g}.")
        if value >= self.below:
            raise BadInputError(f"{field}={value!r}: must be below {self.below:g}.")


COUNT, COUNT_OR_0 = Range(at_least=1, whole=True), Range(at_least=0, whole=True)
COUNT_OR_NONE = Range(at_least=1, whole=True, optional=True)
POSITIVE, NOT_NEGATIVE = Range(above=0.0), Range(at_least=0.0)
POSITIVE_OR_NONE, NOT_NEGATIVE_OR_NONE = Range(above=0.0, optional=True), Range(at_least=0.0, optional=True)


def check_fields(
    config: Any, ranges: Mapping[Range, str], choices: Mapping[str, tuple[object, ...]], switches: str = ""
) -> None:
    """BadInputError that names the first field that is out of its range, or none of its choices.

    ranges, switches: names of fields, with blanks between.
    """
    owner = type(config).__name__
    for limits, names in ranges.items():
        for name in names.split():
            limits.check(f"{owner}.{name}", getattr(config, name))
    for name in switches.split():
        check_switch(f"{owner}.{name}", getattr(config, name))
    for name, options in choices.items():
        if getattr(config, name) not in options:
            listed = ", ".join(map(str, options))
            raise BadInputError(f"{owner}.{name}={getattr(config, name)!r}: must be one of {listed}.")


def check_switch(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise BadInputError(f"{field}={value!r}: must be True or False.")


def read_settings(settings: Mapping[str, Any] | str | None, owner: str = "") -> dict[str, Any]:
    """{} for None; BadInputError for what is no mapping (or that as JSON text)."""
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except ValueError as error:
            raise BadInputError(f"{owner}settings={settings!r:.60}: not JSON ({error}).") from error
    if not isinstance(settings, Mapping | None):
        raise BadInputError(
            f'{owner}settings={settings!r:.60}: give a dict such as {{"learner.num_ranks": 2}}.'
        )
    return dict(settings or {})


def check_backend(owner: str, backend: object) -> None:
    """BadInputError for a backend that does not exist. owner: the configuration's class, for the message."""
    if backend not in ("auto", "local", "ray"):
        raise BadInputError(f"{owner}.backend={backend!r}: must be auto, local or ray.")


def check_cluster(owner: str, cluster: str | None, backend: object, settings: Any) -> None:
    """BadInputError for the address of a cluster beside the backend that uses none."""
    chosen = settings.get("cluster.backend", backend) if isinstance(settings, Mapping) else backend
    if cluster is not None and chosen == "local":
        raise BadInputError(
            f'{owner}.cluster={cluster!r}: backend="local" uses none, it is this process. Set one of the two.'
        )
