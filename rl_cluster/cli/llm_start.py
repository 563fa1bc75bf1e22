"""A RunConfig or FitConfig in: checked, printed (--dry-run) or carried out by `train` or `fit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rl_cluster.cli.commands import train_command
from rl_cluster.cli.describe import describe_fit_plan, describe_plan
from rl_cluster.cli.failures import log_failure
from rl_cluster.cli.fit import fit_command
from rl_cluster.config.checks.fit import check_fit_config
from rl_cluster.config.checks.run import check_config
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.planning.fit_plan import make_fit_plan
from rl_cluster.config.planning.machine import find_machine
from rl_cluster.config.planning.plan import make_plan
from rl_cluster.config.reading.yaml_text import parse_yaml
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.run_folder.folder import RunFolder, new_run_folder, open_run_folder, run_dir_of


def start_run(config: RunConfig, dry_run: bool) -> None:
    machine = find_machine(config.cluster)
    check_config(config, machine)
    plan = make_plan(config, machine)
    if dry_run:
        _show(describe_plan(config, plan))
        return
    from rl_cluster.assembly.train import train

    with new_run_folder(config) as folder:
        try:
            train(config, plan)
        except (BadInputError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise log_failure(folder.log, error) from error


def start_fit(config: FitConfig, dry_run: bool) -> None:
    machine = find_machine(config.cluster)
    check_fit_config(config, machine)
    if dry_run:
        _show(describe_fit_plan(config, make_fit_plan(config, machine)))
        return
    from rl_cluster.assembly.fit import fit

    folder = RunFolder(run_dir_of(config))
    try:
        fit(config)
    except (BadInputError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise (log_failure(folder.log, error) if folder.logs.is_dir() else error) from error


def resume(
    path: Path, overrides: Sequence[str], dry_run: bool, step: int | None = None, force_changes: bool = False
) -> None:
    """Go on with a run or fit, whichever the folder holds."""
    folder = open_run_folder(path)
    data = parse_yaml(folder.config.read_text(encoding="utf-8"), str(folder.config))
    if isinstance(data, dict) and "objective" in data:
        fit_command(None, overrides, dry_run, path, step, force_changes)
        return
    train_command(None, overrides, dry_run, path, step, force_changes)


def _show(text: str) -> None:
    Console(soft_wrap=True, highlight=False).print(text, markup=False)
