"""Which folders may be replaced: those that carry this project's marker, or proof that it wrote them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rl_cluster.errors import BadInputError

MARKER = ".rl_cluster.json"
WRITER = "rl-cluster"
MODEL_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model*.safetensors.index.json"),
    *("adapter_config.json", "adapter_model*.safetensors", "value_head.safetensors"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.*"),
    *("vocab.txt", "vocab.json", "merges.txt", "README.md", "curves.png"),
)
CHECKPOINT_FILES = (
    *("manifest.json", "loop.json", "metrics.json", "scores.json", "trainer_state.json"),
    *("learner/*", "critic/*"),
)
REWARD_MODEL_FILES = ("reward_model.json", "reward_model.safetensors")
PIPELINE_FILES = ("manifest.json", "model.safetensors", "optimizer.pt", "state.pt", "learner/*")
OWN_NAMES = (*MODEL_FILES, *CHECKPOINT_FILES, *REWARD_MODEL_FILES, *PIPELINE_FILES)
"""What we have written into folders that carry no marker; * stands for no /."""


def write_marker(folder: Path, kind: str) -> None:
    """kind: what the folder is (run, checkpoint, model, …). The files that it holds now are noted as ours."""
    files = [name for name in files_in(folder) if name != MARKER]
    content = {"written_by": WRITER, "kind": kind, "files": files}
    (folder / MARKER).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def note_files(folder: Path, names: Sequence[str]) -> None:
    """These files of a marked folder are ours as well."""
    marker = read_marker(folder)
    if marker is not None:
        marker["files"] = sorted({*marker["files"], *names})
        (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def read_marker(folder: Path) -> dict[str, Any] | None:
    """None where there is none of ours."""
    try:
        content = json.loads((folder / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(content, dict) and content.get("written_by") == WRITER
    return content if is_ours and isinstance(content.get("files"), list) else None


def path_to_write(value: Any, field: str, example: str = "models/mine") -> Path:
    """A path of the caller's as an absolute one. Raises BadInputError for what names no folder of its own.

    field: the argument that named it, for messages.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise BadInputError(
            f"{field}={value!r:.80}: is no path. Give the folder to write, such as {example!r}."
        )
    text = os.fspath(value)
    if not text.strip() or "\0" in text:
        raise BadInputError(f"{field}={text!r:.80}: names no folder. Give one, such as {example!r}.")
    return Path(os.path.abspath(os.path.expanduser(text)))


def folder_to_write(value: Any, field: str, kind: str) -> Path:
    """path_to_write, of a folder that is missing, empty, or an older one of its kind. BadInputError else."""
    path = path_to_write(value, field)
    check_replaceable(path, kind, f"{field}={os.fspath(value)!r}")
    return path


def check_replaceable(target: Path, kind: str, named: str | None = None) -> None:
    """Raise BadInputError unless `target` is missing, empty, or a folder of this kind that we wrote.

    named: how the user gave it, for messages; default: the path.
    """
    named = named or str(target)
    refuse_here(target, named)
    if target.is_symlink():
        raise BadInputError(
            f"{named}: is a symbolic link to {os.readlink(target)}. Give another, or the one it leads to."
        )
    if target.exists() and not target.is_dir():
        raise BadInputError(f"{named}: is a file. Give a folder.")
    above = next(folder for folder in target.parents if os.path.lexists(folder))
    if not above.is_dir():
        raise BadInputError(f"{named}: {above} is a file. Give a folder below another.")
    if not target.is_dir() or not any(target.iterdir()) or is_ours(target, kind):
        return
    marker = read_marker(target)
    what = (
        "holds files that are not of this project"
        if marker is None
        else f"is a {marker['kind']}, not a {kind}"
    )
    raise BadInputError(
        f"{named}: {what}, so it is not replaced. Give a new or empty folder, or delete this one yourself."
    )


def refuse_here(target: Path, named: str) -> None:
    """Raise BadInputError for the working directory and those above it, which nothing can replace."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # deleted meanwhile: there is no folder to lose under one's feet
        return
    if target == target.parent or target.resolve() in (here, *here.parents):
        raise BadInputError(
            f"{named}: is the folder you work in, or one above it, and cannot be replaced. Give a folder "
            "of its own, such as 'models/mine'."
        )


def is_ours(folder: Path, kind: str) -> bool:
    """By its marker, or, without one, by what only we write."""
    marker = read_marker(folder)
    if marker is not None:
        return bool(marker["kind"] == kind)
    proof = PROOFS.get(kind)
    return proof is not None and proof(folder)


def keep_foreign_files(old: Path, new: Path) -> None:
    """What others have put into `old`, which `new` replaces, moves over: as a second name, or else a copy."""
    if not old.is_dir():
        return
    own = own_files(old)
    for name in files_in(old):
        place = new / name
        if name in own or os.path.lexists(place):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(old / name, place, follow_symlinks=False)
        except OSError:  # a file system without second names
            shutil.copy2(old / name, place, follow_symlinks=False)


def own_files(folder: Path) -> set[str]:
    """The files of a folder of ours that we wrote, by its marker, or else by their names."""
    marker = read_marker(folder)
    if marker is not None:
        return {MARKER, *marker["files"]}
    return {name for name in files_in(folder) if has_own_name(name)}


def has_own_name(name: str) -> bool:
    """Does a file relative to its folder have a name that we use in models and checkpoints?"""
    return _matches(name, OWN_NAMES)


def files_in(folder: Path) -> list[str]:
    """Every file and link below, relative, with / between the names."""
    found = []
    for path, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        found += [Path(path, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(found)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(name.count("/") == one.count("/") and fnmatch(name, one) for one in patterns)


def _is_checkpoint(folder: Path) -> bool:
    state = _json_object(folder / "loop.json")
    return "step" in state and bool({"ledger", "fingerprint"} & set(state)) and (folder / "learner").is_dir()


def _is_model(folder: Path) -> bool:
    if folder.name in ("model", "adapter") and is_run_config(folder.parent / "config.yaml"):
        return True
    try:
        card = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return f"\n- {WRITER}\n" in card.split("\n---\n")[0] and f" by {WRITER} " in card


def _is_reward_model(folder: Path) -> bool:
    description = _json_object(folder / "reward_model.json")
    weights = (folder / "reward_model.safetensors").is_file()
    return weights and {"kind", "config", "arguments", "base_dtype"} <= set(description)


def _is_pipeline_state(folder: Path) -> bool:
    names = files_in(folder)
    has_model = "model.safetensors" in names or "learner/learner.json" in names
    return has_model and "state.pt" in names and all(_matches(name, PIPELINE_FILES) for name in names)


def is_run_config(file: Path) -> bool:
    """A configuration that a run wrote: of our schema, complete, with its own folder named."""
    from rl_cluster.config.fit import FitConfig
    from rl_cluster.config.reading.load import load_as
    from rl_cluster.config.run import RunConfig

    for kind in (RunConfig, FitConfig):
        try:
            return file.is_file() and load_as(kind, file).run.dir is not None  # type: ignore[attr-defined]
        except BadInputError:
            continue
    return False


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


PROOFS: dict[str, Callable[[Path], bool]] = {
    "checkpoint": _is_checkpoint,
    "model": _is_model,
    "reward model": _is_reward_model,
    "pipeline state": _is_pipeline_state,
}
