"""Files on disk (JSONL, CSV, Parquet, a `datasets` folder) in, raw rows with their place out."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_cluster.config.data import FileSource
from rl_cluster.data.rows import BadRow, RawRows, Row
from rl_cluster.errors import BadInputError
from rl_cluster.files.json_lines import BadLine, parse_object, split_lines


def read_file(source: FileSource, path: str, field: str) -> RawRows:
    """All rows of `path`; `field` is the setting that named it (`data.train.path`), for messages.

    Raises BadInputError for a missing, unreadable or empty file and for a column that does not exist.
    """
    location = Path(path).expanduser()
    if not location.exists():
        raise BadInputError(
            f"{field}={path!r}: no such file or folder (looked in {Path.cwd()}). Correct the path."
        )
    read = READERS[source.source]
    try:
        raw = read(location, source.prompt_column, field)
    except OSError as error:
        raise BadInputError(f"{field}={path!r}: cannot be read: {error}") from error
    if not raw.rows and not raw.bad:
        raise BadInputError(f"{field}={path!r}: the data set is empty. Give a file with at least one row.")
    return raw


def read_jsonl(path: Path, prompt_column: str, field: str) -> RawRows:
    """One JSON object per line, UTF-8; empty lines at the end do not count."""
    if path.is_dir():
        raise BadInputError(f"{field}={str(path)!r}: is a folder; source=jsonl reads one file.")
    rows: list[Row] = []
    bad: list[BadRow] = []
    for number, line in enumerate(split_lines(path.read_bytes().rstrip()), start=1):
        place = f"{path}:{number}"
        value = parse_object(line)
        if isinstance(value, BadLine):
            bad.append(BadRow(place, value.reason))
        elif prompt_column not in value:
            columns = ", ".join(map(repr, value)) or "none"
            bad.append(BadRow(place, f"no column {prompt_column!r} (it has: {columns})"))
        else:
            rows.append(_row(value, place, prompt_column))
    return RawRows(tuple(rows), tuple(bad))


def read_csv(path: Path, prompt_column: str, field: str) -> RawRows:
    """The first line names the columns; every value is a string."""
    if path.is_dir():
        raise BadInputError(f"{field}={str(path)!r}: is a folder; source=csv reads one file.")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restkey="", strict=True)
            _check_column(reader.fieldnames or (), prompt_column, path, field)
            numbered = [(reader.line_num, record) for record in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{field}={str(path)!r}: not a CSV file: {error}") from error
    rows: list[Row] = []
    bad: list[BadRow] = []
    for number, record in numbered:
        place = f"{path}:{number}"
        if "" in record or None in record.values():
            bad.append(BadRow(place, f"more or fewer values than the {len(reader.fieldnames or ())} columns"))
        else:
            rows.append(_row(record, place, prompt_column))
    return RawRows(tuple(rows), tuple(bad))


def read_parquet(path: Path, prompt_column: str, field: str) -> RawRows:
    """One Parquet file, or a folder of them."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise BadInputError(f"{field}={str(path)!r}: not a Parquet file: {error}") from error
    _check_column(table.column_names, prompt_column, path, field)
    return _from_records(table.to_pylist(), path, prompt_column)


def read_dataset_folder(path: Path, prompt_column: str, field: str) -> RawRows:
    """A folder written by `datasets.Dataset.save_to_disk` (one split)."""
    import datasets

    try:
        data = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise BadInputError(
            f"{field}={str(path)!r}: not a folder written by datasets.save_to_disk: {error}"
        ) from error
    if isinstance(data, datasets.DatasetDict):
        splits = ", ".join(str(path / split) for split in data)
        raise BadInputError(f"{field}={str(path)!r}: has several splits. Name one of them: {splits}")
    _check_column(data.column_names, prompt_column, path, field)
    return _from_records(data, path, prompt_column)


def _check_column(columns: Iterable[str], prompt_column: str, path: Path, field: str) -> None:
    if prompt_column not in columns:
        raise BadInputError(
            f"{field.rsplit('.', 1)[0]}.prompt_column={prompt_column!r}: {path} has no such column. "
            f"It has: {', '.join(columns)}."
        )


def _from_records(records: Iterable[Any], path: Path, prompt_column: str) -> RawRows:
    numbered = enumerate(records, start=1)
    return RawRows(tuple(_row(record, f"{path}: row {number}", prompt_column) for number, record in numbered))


def _row(record: Mapping[str, Any], place: str, prompt_column: str) -> Row:
    rest = {key: value for key, value in record.items() if key != prompt_column}
    return Row(place=place, prompt=record[prompt_column], metadata=rest)


READERS: dict[str, Callable[[Path, str, str], RawRows]] = {
    "jsonl": read_jsonl,
    "csv": read_csv,
    "parquet": read_parquet,
    "dataset": read_dataset_folder,
}
