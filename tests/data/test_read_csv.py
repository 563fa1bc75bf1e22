"""CSV files as sources of rows: values as they stand, and what is no table refused or counted by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_cluster.config.data import FileSource
from rl_cluster.data.readers import read_file
from rl_cluster.errors import BadInputError


def read(path: Path, column: str = "prompt"):
    return read_file(
        FileSource(source="csv", path=str(path), prompt_column=column), str(path), "data.train.path"
    )


def test_values_are_strings_and_quotes_hold_commas_and_line_ends(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,answer\n1+1=,2\n"a, ""b""\nc",true\n', encoding="utf-8")
    raw = read(path)
    assert [row.prompt for row in raw.rows] == ["1+1=", 'a, "b"\nc']
    assert [row.metadata for row in raw.rows] == [{"answer": "2"}, {"answer": "true"}]
    assert [row.place for row in raw.rows] == [f"{path}:2", f"{path}:4"]


def test_a_row_with_too_few_or_too_many_values_is_bad_by_its_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\na\nb,1\nc,2,3\n")
    raw = read(path)
    assert [row.prompt for row in raw.rows] == ["b"]
    assert [bad.place for bad in raw.bad] == [f"{path}:2", f"{path}:4"]
    assert "the 2 columns" in raw.bad[0].reason


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"question,answer\na,b\n", "question, answer"),
        (b"prompt\n\xff\n", "not a CSV file"),
        (b'prompt\n"never closed\n', "not a CSV file"),
        (b"prompt\n", "empty"),
    ],
)
def test_what_is_no_table_of_prompts_is_refused(tmp_path, content, part):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=part):
        read(path)
