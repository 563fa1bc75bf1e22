"""May an earlier run be deleted for a new one? What runs write into their folders, and nothing else, may."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from rl_cluster.errors import BadInputError
from rl_cluster.files.own_folders import (
    files_in,
    has_own_name,
    is_ours,
    is_run_config,
    own_files,
    refuse_here,
)
from rl_cluster.run_folder.claim import START
from rl_cluster.run_folder.lock import is_lock_file

RUN_FILES = (
    *("config.yaml", "metrics.jsonl", "alarms.jsonl", "samples.jsonl", "ledger.json", "reference.npz"),
    *(
        "logs/*",
        "starts/*",
        "checkpoints/*",
        "trajectories/*",
        "tensorboard/*",
        "wandb/*",
        "model/*",
        "adapter/*",
    ),
    "starts/*",
    *(
        f"{START}/*.jsonl",
        *(f"{START}/{name}/*" for name in ("scratch", "supervised", "policy", "reference")),
    ),
    *(f"{START}/reward/*", f"{START}/reward-*/*"),
)
"""What runs write into their folders; a last * stands for whatever lies below."""


def check_overwritable(path: Path) -> None:
    """For overwrite_output_dir. Raise BadInputError unless `path` is missing, empty, or a run of ours that
    holds nothing of anybody else."""
    named = f"output_dir={str(path)!r}"
    if path.is_symlink():
        raise BadInputError(f"{named}: is a symbolic link, so overwrite_output_dir does not replace it.")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not (is_ours(path, "run") or _wrote_run(path)):
        raise BadInputError(
            f"{named}: is not empty, and not an earlier run, so overwrite_output_dir does not delete it. "
            "Choose another folder."
        )
    refuse_here(path, named)
    own = own_files(path)
    for name in files_in(path):
        is_named_so = has_own_name(name) or any(fnmatch(name, one) for one in RUN_FILES)
        if name not in own and not is_lock_file(name) and not is_named_so:
            raise BadInputError(
                f"{named}: holds {name}, which no run wrote, so overwrite_output_dir does not delete it. "
                "Move that away, or choose another folder."
            )


def _wrote_run(path: Path) -> bool:
    """A run from before folders were marked: its own complete configuration, and the folder of its logs."""
    return (path / "logs").is_dir() and is_run_config(path / "config.yaml")
