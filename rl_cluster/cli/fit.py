"""What `fit` does: its arguments in; the assembly is called upon, or with --dry-run only the plan printed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from rl_cluster.assembly.starts import going_on
from rl_cluster.cli.describe import describe_fit_plan
from rl_cluster.cli.failures import log_failure
from rl_cluster.cli.resumed import check_resume_options, resumed_config
from rl_cluster.config.checks.fit import check_fit_config
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.planning.fit_plan import make_fit_plan
from rl_cluster.config.planning.machine import find_machine
from rl_cluster.config.reading.load import load_as
from rl_cluster.errors import BadInputError
from rl_cluster.loop.fit import FitState
from rl_cluster.run_folder.claim import check_unused
from rl_cluster.run_folder.folder import open_run_folder, preparing_run, resolve_run_dir, run_dir_of


def fit_command(
    config: str | None,
    overrides: Sequence[str],
    dry_run: bool,
    resume: Path | None,
    step: int | None = None,
    force_changes: bool = False,
) -> None:
    """Check everything, then hand over to the assembly. Raises BadInputError or what the run raised."""
    check_resume_options(resume, step, force_changes)
    if resume is None and config is None:
        raise BadInputError("give a recipe (fit configs/dpo.yaml) or a run to go on with (--resume RUN).")
    if resume is None:
        assert config is not None
        resolved = load_as(FitConfig, config, overrides)
        check_unused(run_dir_of(resolve_run_dir(resolved)))
    else:
        resolved, _ = resumed_config(FitConfig, config, overrides, resume, force_changes)
    if dry_run:
        machine = find_machine(resolved.cluster)
        check_fit_config(resolved, machine, config or str(resume))
        plan = make_fit_plan(resolved, machine)
        if resume is not None:
            going_on(open_run_folder(resume), resolved, FitState.read, step, force_changes)
        shown = describe_fit_plan(resolve_run_dir(resolved), plan)
        Console(soft_wrap=True, highlight=False).print(shown, markup=False)
        return
    with preparing_run(resolved) if resume is None else nullcontext(resolved) as prepared:
        _fit(prepared, resume, step, force_changes)


def _fit(config: FitConfig, resume: Path | None, step: int | None, force_changes: bool) -> None:
    from rl_cluster.assembly.fit import fit

    log = run_dir_of(config) / "logs" / "run.log"
    try:
        fit(config, resume=resume, step=step, force_changes=force_changes)
    except BadInputError:
        raise
    except (KeyboardInterrupt, SystemExit):
        again = f"fit --resume {run_dir_of(config)}"
        print(f"interrupted; from its newest checkpoint it goes on by: {again}")
        raise
    except Exception as error:
        if not log.parent.is_dir():
            raise
        raise log_failure(log, error) from error
