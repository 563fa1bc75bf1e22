"""--data-path: files, folders and names of data sets become files with known columns and numbers of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_cluster.cli.llm_data import DataFile, find_data
from rl_cluster.errors import BadInputError

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": "3"}]


def found(path: Path | str, split: str = "train") -> DataFile:
    return find_data(str(path), split, Path("/no/start"))


def test_every_kind_of_file_and_folder_is_found_with_its_columns(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    (tmp_path / "test.csv").write_text("prompt,answer\na,1\nb,2\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "more.parquet")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "several")
    columns = ("prompt", "answer")
    assert found(tmp_path) == DataFile("jsonl", str(tmp_path / "train.jsonl"), columns, 3)
    assert found(tmp_path, "test") == DataFile("csv", str(tmp_path / "test.csv"), columns, 2)
    assert found(tmp_path, "more") == DataFile("parquet", str(tmp_path / "more.parquet"), columns, 3)
    assert found(tmp_path / "one") == DataFile("dataset", str(tmp_path / "one"), columns, 3)
    assert found(tmp_path / "several", "test") == DataFile(
        "dataset", str(tmp_path / "several/test"), columns, 1
    )


def test_a_data_set_of_the_hub_is_written_into_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked = []

    def load(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    file = find_data("owner/name", "train[:3]", tmp_path / "start")
    assert asked == [("owner/name", "train[:3]")]
    assert (file.columns, file.num_rows) == (("prompt", "answer"), 3)
    assert [json.loads(line) for line in Path(file.path).read_text().splitlines()] == ROWS

    def fail(name: str, split: str) -> None:
        raise ConnectionError("the hub does not answer\nfor a long time")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(BadInputError, match=r"owner/name.*split 'train'.*the hub does not answer. Correct"):
        find_data("owner/name", "train", tmp_path / "start")


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("rows.txt", b"a", "no file of a known kind"),
        ("rows.jsonl", b"", "has no rows"),
        ("rows.jsonl", b"[1]\n", "JSON list"),
        ("rows.jsonl", b"{broken\n", "cannot be read as jsonl"),
        ("rows.parquet", b"no", "cannot be read as parquet"),
        ("rows.csv", b"prompt\n", "has no rows"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, part: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError, match=part) as refused:
        found(tmp_path / name)
    assert str(refused.value).startswith(f"--data-path {tmp_path / name}")


def test_a_broken_first_line_hides_no_columns(tmp_path: Path) -> None:
    """Whether broken rows are refused or skipped is decided later, by --on-bad-row."""
    (tmp_path / "rows.jsonl").write_text('{broken\n{"prompt": "a"}\n')
    assert found(tmp_path / "rows.jsonl").columns == ("prompt",)


def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    for path in ("./data", "/no/such", "rows.jsonl", "data", "a/b/c"):
        with pytest.raises(BadInputError, match="no such file or folder"):
            found(path)
