"""A RunConfig and a Machine in; BadInputError with every combination that cannot work out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rl_cluster.config.checks.algorithm import ALGORITHM_CHECKS
from rl_cluster.config.checks.cluster import CLUSTER_CHECKS
from rl_cluster.config.checks.data import DATA_CHECKS
from rl_cluster.config.checks.environment import ENVIRONMENT_CHECKS
from rl_cluster.config.checks.local import LOCAL_CHECKS
from rl_cluster.config.checks.model import MODEL_CHECKS
from rl_cluster.config.planning.machine import Machine
from rl_cluster.config.reading.problems import Problem, refuse
from rl_cluster.config.run import RunConfig

Check = Callable[[RunConfig, Machine], Iterable[Problem]]

CHECKS: tuple[Check, ...] = (
    *MODEL_CHECKS,
    *DATA_CHECKS,
    *ENVIRONMENT_CHECKS,
    *ALGORITHM_CHECKS,
    *CLUSTER_CHECKS,
    *LOCAL_CHECKS,
)


def find_problems(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Every problem of every check."""
    for check in CHECKS:
        yield from check(config, machine)


def check_config(config: RunConfig, machine: Machine, source: str = "") -> None:
    """Raise BadInputError that lists all problems, each with field, value and remedy."""
    refuse(find_problems(config, machine), source)
