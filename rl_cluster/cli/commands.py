"""What each command does: its arguments in; assembly, plots and files are called upon."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from rl_cluster.assembly.starts import point_to_go_on
from rl_cluster.cli.describe import describe_plan
from rl_cluster.cli.failures import log_failure
from rl_cluster.cli.resumed import check_resume_options, resumed_config
from rl_cluster.config.checks.run import check_config
from rl_cluster.config.planning.machine import find_machine
from rl_cluster.config.planning.plan import Plan, make_plan
from rl_cluster.config.reading.load import load_config
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.run_folder.claim import check_unused
from rl_cluster.run_folder.folder import (
    held_run_folder,
    new_run_folder,
    open_run_folder,
    preparing_run,
    resolve_run_dir,
    run_dir_of,
)


def train_command(
    config: str | None,
    overrides: Sequence[str],
    dry_run: bool,
    resume: Path | None,
    step: int | None = None,
    force_changes: bool = False,
) -> None:
    """Check everything, then hand over to the assembly. Raises BadInputError or what the run raised."""
    check_resume_options(resume, step, force_changes)
    if resume is not None:
        resolved, folder = resumed_config(RunConfig, config, overrides, resume, force_changes)
    elif config is None:
        raise BadInputError(
            "give a recipe (train configs/quickstart.yaml) or a run to go on with (--resume RUN)."
        )
    else:
        resolved, folder = load_config(config, overrides), None
    plan = _checked_plan(resolved, source=config or str(resume))
    if folder is None:
        check_unused(run_dir_of(resolve_run_dir(resolved)))
    if dry_run:
        if folder is not None:
            point_to_go_on(folder, resolved, step, force_changes)
        Console(soft_wrap=True, highlight=False).print(
            describe_plan(resolve_run_dir(resolved), plan), markup=False
        )
        return
    from rl_cluster.assembly.train import train

    with ExitStack() as stack:
        if folder is None:
            resolved = stack.enter_context(preparing_run(resolved))
            used = stack.enter_context(new_run_folder(resolved))
        else:
            used = stack.enter_context(held_run_folder(folder.path))
        try:
            train(resolved, plan, None if folder is None else used.path, step, force_changes)
        except BadInputError:
            raise
        except (KeyboardInterrupt, SystemExit):
            again = f"train --resume {used.path}"
            print(f"interrupted; from its newest checkpoint it goes on by: {again}")
            raise
        except Exception as error:
            raise log_failure(used.log, error) from error


def _checked_plan(config: RunConfig, source: str) -> Plan:
    machine = find_machine(config.cluster)
    check_config(config, machine, source)
    return make_plan(config, machine)


def eval_command(source: str, overrides: Sequence[str], dry_run: bool) -> None:
    """A recipe, or a run folder, whose exported model is then evaluated."""
    config = load_eval_config(source, overrides)
    plan = _checked_plan(config, source)
    if dry_run:
        Console(soft_wrap=True, highlight=False).print(describe_plan(config, plan), markup=False)
        return
    from rl_cluster.assembly.evaluate import evaluate

    metrics = evaluate(config, plan)
    for name, value in sorted(metrics.items()):
        print(f"{name}: {value:.4f}")


def load_eval_config(source: str, overrides: Sequence[str]) -> RunConfig:
    """Of a run folder: its config with model.path set to what it exported."""
    if not Path(source).is_dir():
        return load_config(source, overrides)
    folder = open_run_folder(source)
    if not folder.model.is_dir():
        raise BadInputError(
            f"{source}: has no model folder, so its training has not ended. Resume it, or evaluate "
            "another model with model.path=…"
        )
    exported = [f"model.path={str(folder.model)!r}", "model.scratch=null", "model.supervised=null"]
    return folder.read_config_as(RunConfig, [*exported, *overrides])


def plot_command(runs: Sequence[Path], out: Path, names: Sequence[str], title: str) -> None:
    """Write one PNG from the metrics of several runs."""
    from rl_cluster.metrics.curve import plot_runs

    folders = [open_run_folder(run) for run in runs]
    target = plot_runs(folders, out, names, title) if names else plot_runs(folders, out, title=title)
    print(target)
