from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_cluster.config.data import FileSource
from rl_cluster.data.readers import read_file
from rl_cluster.data.rows import RawRows
from rl_cluster.errors import BadInputError

RECORDS = [{"prompt": "1+1=", "answer": "2", "k": 1}, {"prompt": "2+2=", "answer": "4", "k": 2}]


def read(path: Path, source: Any = "jsonl", prompt_column: str = "prompt") -> RawRows:
    config = FileSource(source=source, path=str(path), prompt_column=prompt_column)
    return read_file(config, config.path, "data.train.path")


def write_jsonl(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def write_parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def test_jsonl_rows_come_in_order_with_their_line_and_other_columns(tmp_path: Path) -> None:
    raw = read(write_jsonl(tmp_path / "a.jsonl", *map(json.dumps, RECORDS)))
    assert [row.prompt for row in raw.rows] == ["1+1=", "2+2="]
    assert [row.metadata for row in raw.rows] == [{"answer": "2", "k": 1}, {"answer": "4", "k": 2}]
    assert raw.rows[1].place.endswith("a.jsonl:2")
    assert raw.bad == ()


def test_parquet_and_dataset_folders_give_what_jsonl_gives(tmp_path: Path) -> None:
    import datasets

    records = [*RECORDS, {"prompt": "3+3=", "answer": "6", "k": 3}]
    parquet = read(write_parquet(tmp_path / "a.parquet", records), "parquet")
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "folder"))
    folder = read(tmp_path / "folder", "dataset")
    for raw in (parquet, folder):
        assert [(row.prompt, row.metadata) for row in raw.rows] == [
            (r["prompt"], {"answer": r["answer"], "k": r["k"]}) for r in records
        ]
    assert parquet.rows[2].place.endswith("a.parquet: row 3")


def test_chat_messages_survive_parquet(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    raw = read(write_parquet(tmp_path / "a.parquet", [{"prompt": messages}]), "parquet")
    assert raw.rows[0].prompt == messages


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON: Expecting property name"),
        ("", "empty line"),
        ("[1, 2]", "a JSON list, but an object"),
        ('{"question": "x"}', "no column 'prompt' (it has: 'question')"),
        ("{}", "no column 'prompt' (it has: none)"),
        (b'{"prompt": "\xff"}', "not UTF-8 (byte 13 of the line)"),
        ("[" * 200_000, "not JSON"),
        ('{"prompt": ' + "1" * 5000 + "}", "not JSON"),
    ],
)
def test_a_bad_line_is_reported_with_file_line_and_reason(tmp_path: Path, line: Any, reason: str) -> None:
    raw = read(write_jsonl(tmp_path / "a.jsonl", '{"prompt": "1+1="}', line, '{"prompt": "2+2="}'))
    assert [row.prompt for row in raw.rows] == ["1+1=", "2+2="]
    (bad,) = raw.bad
    assert bad.place.endswith("a.jsonl:2")
    assert bad.reason.startswith(reason), bad.reason[:200]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1"}\r\n{"prompt": "2"}\r\n\r\n')
    raw = read(path)
    assert [row.prompt for row in raw.rows] == ["1", "2"]
    assert raw.bad == ()


def test_files_that_cannot_serve_are_refused_with_field_value_and_remedy(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    not_parquet = tmp_path / "a.parquet"
    not_parquet.write_text("hello")
    cases = [
        (tmp_path / "missing.jsonl", "jsonl", "no such file or folder"),
        (empty, "jsonl", "the data set is empty"),
        (tmp_path, "jsonl", "is a folder; source=jsonl reads one file"),
        (not_parquet, "parquet", "not a Parquet file"),
        (tmp_path, "dataset", "not a folder written by datasets.save_to_disk"),
        (write_parquet(tmp_path / "b.parquet", [{"prompt": "x"}][:0]), "parquet", "empty|no such column"),
    ]
    for path, source, message in cases:
        with pytest.raises(BadInputError, match=message) as caught:
            read(path, source)
        assert "data.train." in str(caught.value)


def test_a_missing_column_names_those_that_there_are(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", RECORDS)
    with pytest.raises(BadInputError, match=r"data\.train\.prompt_column='query'.*It has: prompt, answer, k"):
        read(path, "parquet", "query")


def test_a_folder_of_several_splits_asks_for_one_of_them(tmp_path: Path) -> None:
    import datasets

    split = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "folder"))
    with pytest.raises(BadInputError, match=r"several splits.*folder/train.*folder/test"):
        read(tmp_path / "folder", "dataset")
    assert len(read(tmp_path / "folder" / "test", "dataset").rows) == 2


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300))
def test_any_bytes_at_all_become_rows_and_reasons_or_a_bad_input_error(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(content)
    try:
        raw = read(path)
    except BadInputError:
        assert not content.strip()
        return
    assert len(raw.rows) + len(raw.bad) == content.rstrip().count(b"\n") + 1


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300))
def test_any_bytes_called_parquet_are_a_bad_input_error(tmp_path: Path, content: bytes) -> None:
    for prefix in (b"", b"PAR1"):
        path = tmp_path / "fuzz.parquet"
        path.write_bytes(prefix + content + prefix)
        with pytest.raises(BadInputError):
            read(path, "parquet")
