"""What --resume says: a run folder and overrides in, the configuration of now out; nothing is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rl_cluster.config.fit import FitConfig
from rl_cluster.config.reading.changes import check_override_words
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError
from rl_cluster.run_folder.folder import RunFolder, open_run_folder

AnyConfig = TypeVar("AnyConfig", RunConfig, FitConfig)


def check_resume_options(resume: Path | None, step: int | None, force_changes: bool) -> None:
    """Raise BadInputError for what has a meaning beside --resume only."""
    if resume is None and (step is not None or force_changes):
        given = "--force-changes" if step is None else f"--step {step}"
        raise BadInputError(f"{given}: only with --resume RUN, for going on with a run.")
    if step is not None and step < 0:
        raise BadInputError(f"--step {step}: steps are counted from 0. Give the step of a checkpoint.")


def resumed_config(
    kind: type[AnyConfig], config: str | None, overrides: Sequence[str], resume: Path, force_changes: bool
) -> tuple[AnyConfig, RunFolder]:
    """The run's own configuration with the overrides. Raises BadInputError for a recipe beside it, and for
    settings that a resumed run may not change unless force_changes."""
    folder = open_run_folder(resume)
    words: list[str] = [*([config] if config else []), *overrides]
    for word in words:
        if "=" not in word:
            raise BadInputError(f"{word}: --resume takes the configuration of the run; leave the recipe out.")
        if word.startswith("run.dir="):
            raise BadInputError(f"{word}: a run goes on in its own folder; leave it out.")
    if not force_changes:
        check_override_words(folder.read_config_as(kind), words, str(folder.path))
    return folder.read_config_as(kind, words), folder
