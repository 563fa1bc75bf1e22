"""A folder in, the sizes and SHA-256 of its files in manifest.json out; and later, what of it has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from rl_cluster.files.atomic import write_atomically
from rl_cluster.files.own_folders import MARKER, files_in

MANIFEST = "manifest.json"
HASHING_THREADS = 4
"""hashlib gives the interpreter's lock away; more would only wait for the disk."""


class FileRecord(BaseModel):
    """Of one file, by its name relative to the folder."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    size: NonNegativeInt
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """`files`: everything in the folder when the manifest was written, but for itself."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    format: int = Field(ge=1, le=1)
    files: dict[str, FileRecord]


def write_manifest(folder: Path) -> None:
    """Over all files of the folder, as its last. Raises OSError."""
    _write(folder, files_in(folder), {})


def extend_manifest(folder: Path, added: Sequence[str]) -> None:
    """Take in files that were added since; what is listed already keeps its record, so that damage done
    meanwhile is not blessed. In one step. Raises OSError and, for a damaged manifest, ValueError."""
    _write(folder, added, read_manifest(folder).files)


def _write(folder: Path, names: Sequence[str], known: dict[str, FileRecord]) -> None:
    names = [name for name in names if name not in (MANIFEST, MARKER) and name not in known]
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        records = list(pool.map(lambda name: _record(folder / name), names))
    manifest = Manifest(format=1, files={**known, **dict(zip(names, records, strict=True))})
    write_atomically(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError that says what is wrong with the manifest itself, OSError where there is none."""
    text = (folder / MANIFEST).read_bytes()
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{MANIFEST}: {describe(error)}") from None


def problem_with(folder: Path) -> str | None:
    """What differs from the manifest, one file named; None where every listed file is as it was written."""
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return str(error)
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        problems = pool.map(lambda item: _problem(folder, *item), sorted(manifest.files.items()))
        return next((problem for problem in problems if problem is not None), None)


def signature(folder: Path) -> tuple[Any, ...]:
    """What changes when a file is written, without reading it."""
    stats = [(name, (folder / name).lstat()) for name in files_in(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def describe(error: ValidationError) -> str:
    """The first thing that pydantic found, on one line."""
    first = error.errors(include_url=False)[0]
    place: Sequence[Any] = first["loc"]
    where = ".".join(str(part) for part in place)
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def _problem(folder: Path, name: str, record: FileRecord) -> str | None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return f"{MANIFEST} names {name!r}, which is outside of the folder"
    file = folder / name
    try:
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != record.size:
            return f"{name} has {size} bytes instead of {record.size}"
        if _record(file).sha256 != record.sha256:
            return f"{name} has changed since it was written (its SHA-256 is another)"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None


def _record(path: Path) -> FileRecord:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(size=file.tell(), sha256=digest.hexdigest())


def read_json(path: Path) -> Any:
    """Raises OSError and ValueError."""
    return json.loads(path.read_bytes())
