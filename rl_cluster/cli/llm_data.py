"""What --data-path names (a file, a folder, a data set of the hub) in; files for a configuration out."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rl_cluster.errors import BadInputError
from rl_cluster.files.json_lines import parse_object, split_lines
from rl_cluster.run_folder.claim import make_room

SOURCES = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class DataFile:
    """source: as in data.source. columns: of its first row."""

    source: str
    path: str
    columns: tuple[str, ...]
    num_rows: int


def find_data(path: str, split: str, workspace: Path, flag: str = "--data-path") -> DataFile:
    """The file of one split; a data set of the hub is first written into `workspace` (made if need be).

    Raises BadInputError that names the flag and what is there instead.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return _open(_source(place, flag), place, flag)
    if place.is_dir():
        return _in_folder(place, split, flag)
    if path.startswith(("/", ".", "~")) or place.suffix in SOURCES or path.count("/") != 1:
        raise BadInputError(
            f"{flag} {path}: there is no such file or folder (looked in {Path.cwd()}). Give a .jsonl, "
            f".csv or .parquet file, a folder with {split}.jsonl, or owner/name of a data set of the hub."
        )
    return _open("jsonl", _download(path, split, workspace, flag), flag)


def _source(place: Path, flag: str) -> str:
    if place.suffix not in SOURCES:
        raise BadInputError(f"{flag} {place}: is no file of a known kind; give one of {', '.join(SOURCES)}.")
    return SOURCES[place.suffix]


def _in_folder(folder: Path, split: str, flag: str) -> DataFile:
    if (folder / "dataset_dict.json").is_file() and (folder / split).is_dir():
        return _open("dataset", folder / split, flag)
    if (folder / "state.json").is_file():
        return _open("dataset", folder, flag)
    for suffix, source in SOURCES.items():
        if (folder / f"{split}{suffix}").is_file():
            return _open(source, folder / f"{split}{suffix}", flag)
    names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    expected = ", ".join(f"{split}{suffix}" for suffix in SOURCES)
    raise BadInputError(
        f"{flag} {folder}: holds no split {split!r} ({expected}), but: {names}. Name the file itself, or "
        "choose the split with --train-split."
    )


def _download(name: str, split: str, workspace: Path, flag: str) -> Path:
    import datasets

    target = workspace / f"{split.replace('/', '-')}.jsonl"
    try:
        rows = datasets.load_dataset(name, split=split)
    # The hub's client, its parsers and the network fail in many ways, all of which mean: not this data set.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInputError(
            f"{flag} {name}: there is no such file or folder, and as a data set of the hub it cannot be "
            f"loaded (split {split!r}): {reason}. Correct the name, or give a file."
        ) from error
    rows.to_json(str(make_room(target)))
    return target


def _open(source: str, path: Path, flag: str) -> DataFile:
    try:
        columns, num_rows = PEEKS[source](path)
    except (OSError, ValueError, csv.Error) as error:
        raise BadInputError(f"{flag} {path}: cannot be read as {source}: {error}") from error
    if not num_rows:
        raise BadInputError(f"{flag} {path}: has no rows. Give at least one.")
    return DataFile(source, str(path), columns, num_rows)


Peek = tuple[tuple[str, ...], int]
"""Columns and number of rows."""


def _peek_jsonl(path: Path) -> Peek:
    lines = [line for line in split_lines(path.read_bytes()) if line.strip()]
    problems = []
    for line in lines:
        row = parse_object(line)
        if isinstance(row, dict):
            return tuple(row), len(lines)
        problems.append(row.reason)
    if problems:
        raise ValueError(f"no line is a row; the first is {problems[0]}")
    return (), 0


def _peek_csv(path: Path) -> Peek:
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        num_rows = sum(1 for _ in reader)
        return tuple(reader.fieldnames or ()), num_rows


def _peek_parquet(path: Path) -> Peek:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        return tuple(file.schema_arrow.names), file.metadata.num_rows


def _peek_dataset(path: Path) -> Peek:
    import datasets

    rows = datasets.load_from_disk(str(path))
    if isinstance(rows, datasets.DatasetDict):
        raise ValueError(f"it has several splits: {', '.join(rows)}")
    return tuple(rows.column_names), len(rows)


PEEKS: dict[str, Callable[[Path], Peek]] = {
    "jsonl": _peek_jsonl,
    "csv": _peek_csv,
    "parquet": _peek_parquet,
    "dataset": _peek_dataset,
}


def require_column(file: DataFile, column: str, flag: str, meaning: str) -> str:
    """The column's name; BadInputError that says what there is, and by which flag it is named."""
    if column not in file.columns:
        raise BadInputError(
            f"{flag} {column}: {file.path} has no such column ({meaning}). It has: "
            f"{', '.join(file.columns) or 'none'}. Name the right one with {flag}."
        )
    return column
