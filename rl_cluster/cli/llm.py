"""`rl-cluster llm`: flags in; a RunConfig or FitConfig, and then the same `train` and `fit` as everywhere."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from rl_cluster.cli.llm_flags import ACTS_FOR, FIT, TRAINERS, Flags, flag_name
from rl_cluster.cli.resumed import check_resume_options
from rl_cluster.errors import BadInputError

EPILOG = (
    "Any other setting follows as KEY.PATH=VALUE, as for train (optimizer.eps=1e-6 learner.zero_stage=2). "
    "Data formats and examples: docs/llm.md."
)


def run_llm(flags: Flags, overrides: Sequence[str]) -> None:
    """Raises BadInputError before anything starts, or what the run raised."""
    if not flags.train:
        raise BadInputError("llm: add --train; training is all that this command does.")
    check_resume_options(
        None if flags.resume is None else Path(flags.resume), flags.step, flags.force_changes
    )
    if flags.resume is not None:
        _resume(flags, overrides)
        return
    _check_flags(flags)
    if flags.dry_run:
        with tempfile.TemporaryDirectory(prefix="rl-cluster-dry-run-") as folder:
            _start(flags, overrides, Path(folder) / "run")
        return
    _start(flags, overrides, None)


def run_dir(flags: Flags, now: datetime | None = None) -> Path:
    """--project-name, or runs/TRAINER-DATE-TIME, with -2, -3 … where that is taken."""
    if flags.project_name is not None:
        return Path(flags.project_name).expanduser()
    base = Path("runs") / f"{flags.trainer}-{(now or datetime.now()).strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _place(flags: Flags) -> Path | Callable[[], Path]:
    """What was named, or a function that finds a free name."""
    return run_dir(flags).absolute() if flags.project_name else lambda: run_dir(flags).absolute()


def _check_flags(flags: Flags) -> None:
    """Is the trainer known, and does every given flag act for it?"""
    from rl_cluster.config.reading.problems import nearest

    if flags.trainer not in TRAINERS:
        close = nearest(flags.trainer, TRAINERS)
        hint = f" Did you mean {close}?" if close else ""
        raise BadInputError(f"--trainer {flags.trainer}: must be one of {', '.join(TRAINERS)}.{hint}")
    if flags.model is None:
        raise BadInputError("--model: is missing. Give a Hugging Face folder or hub name.")
    for name, trainers in ACTS_FOR.items():
        if flags.trainer not in trainers and flags.is_given(name):
            raise BadInputError(
                f"{flag_name(name)} {getattr(flags, name)}: has no meaning for --trainer {flags.trainer}; "
                f"it is for {', '.join(trainers)}. Leave it out."
            )
    if flags.valid_split is not None and flags.held_out:
        raise BadInputError(
            f"--held-out {flags.held_out}: --valid-split {flags.valid_split} is what to evaluate on. Leave "
            "one of the two out."
        )
    for name in ("lora_r", "lora_alpha", "lora_dropout", "target_modules"):
        if flags.is_given(name) and not flags.peft:
            raise BadInputError(f"{flag_name(name)} {getattr(flags, name)}: is for adapters. Add --peft.")


def _start(flags: Flags, overrides: Sequence[str], scrap: Path | None) -> None:
    """scrap: of a dry run, instead of the run's folder, for what the plan needs to look at."""
    from rl_cluster.cli import llm_fit, llm_run
    from rl_cluster.cli.llm_nested import with_flags
    from rl_cluster.cli.llm_start import start_fit, start_run
    from rl_cluster.run_folder.claim import preparing

    table = llm_fit.FIT if flags.trainer in FIT else llm_run.RUN
    try:
        with preparing(_place(flags) if scrap is None else scrap) as claim:
            if flags.trainer in FIT:
                start_fit(llm_fit.fit_config(flags, overrides, claim.path), flags.dry_run)
            else:
                start_run(llm_run.run_config(flags, overrides, claim.path), flags.dry_run)
    except BadInputError as error:
        raise BadInputError(with_flags(str(error), table, flags.trainer)) from error


def _resume(flags: Flags, overrides: Sequence[str]) -> None:
    """All settings are the run's own; KEY.PATH=VALUE may change some."""
    allowed = ("train", "resume", "step", "force_changes", "dry_run")
    for name in ACTS_FOR:
        if name not in allowed and flags.is_given(name):
            raise BadInputError(
                f"{flag_name(name)} {getattr(flags, name)}: --resume takes the settings of the run. Change "
                "them as KEY.PATH=VALUE, or leave it out."
            )
    from rl_cluster.cli.llm_start import resume

    assert flags.resume is not None
    resume(Path(flags.resume), overrides, flags.dry_run, flags.step, flags.force_changes)


def _command() -> Callable[..., None]:
    """A function whose signature typer reads as the options of Flags."""
    hints: dict[str, Any] = get_type_hints(Flags)

    def llm(overrides: list[str] | None = None, **given: Any) -> None:
        """Train a language model: sft, reward, dpo, orpo, kto, ppo, rloo or grpo."""
        run_llm(Flags(**given), overrides or [])

    words = typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Any other setting, in YAML.")
    parameters = [
        inspect.Parameter(
            "overrides",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[list[str] | None, words],
        )
    ]
    for flag in fields(Flags):
        # Made at run time, for typer; a type checker has nothing to say about it.
        annotation: Any = Annotated.__class_getitem__((hints[flag.name], flag.metadata["option"]))  # type: ignore[attr-defined]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(flag.name, keyword, default=flag.default, annotation=annotation))
    llm.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    llm.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return llm


def add_llm(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("llm", epilog=EPILOG)(_command())
