"""JSONL is split at newlines only, and what is no row is named with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_cluster.cli.llm_data import find_data
from rl_cluster.config.data import FileSource
from rl_cluster.data.readers import read_file
from rl_cluster.errors import BadInputError
from rl_cluster.files.json_lines import read_steps, split_lines
from rl_cluster.metrics.sink import JsonLines
from rl_cluster.protocols import SampleRow
from rl_cluster.run_folder.folder import RunFolder

ODD = "one\u2028two\u2029three\x85four\x0bfive\x0csix\x1cseven\x1deight\x1enine\rten\r\neleven\ntwelve"
"""Everything that str.splitlines takes for an end of line."""


def test_only_a_newline_ends_a_line():
    assert len(ODD.splitlines()) == 12
    assert split_lines(f"{ODD}\n".encode()) == [line.encode() for line in ODD.split("\n")]
    assert split_lines(b"") == []
    assert split_lines(b"a\n\nb") == [b"a", b"", b"b"]


def test_resuming_keeps_every_sample_whatever_it_holds(tmp_path):
    folder = RunFolder(tmp_path)
    with JsonLines(folder) as sink:
        for step in (1, 2, 3):
            sink.metrics(step, {"loss": 0.5})
            sink.samples(step, [SampleRow(ODD, f"{step}{ODD}", 1.0), SampleRow("\ud800", "lone", None)])
    folder.alarms.write_text('{"step": 1}\n{"step": 3}\n')
    before = folder.samples.read_bytes().split(b"\n")
    with JsonLines(folder, last_step=2) as sink:
        sink.samples(3, [SampleRow("q", ODD, 0.0)])
    after = folder.samples.read_bytes().split(b"\n")
    assert after[:4] == before[:4]
    rows = [json.loads(line) for line in after if line]
    assert [(row["step"], row["response"]) for row in rows] == [
        *((step, text) for step in (1, 2) for text in (f"{step}{ODD}", "lone")),
        (3, ODD),
    ]
    assert rows[1]["query"] == "\ud800"
    assert [row["step"] for row in folder.read_metrics()] == [1, 2]
    assert folder.alarms.read_text() == '{"step": 1}\n'


def test_the_cut_is_a_new_file_in_place_of_the_old_and_nothing_is_lost_when_the_disk_is_full(
    tmp_path, monkeypatch
):
    folder = RunFolder(tmp_path)
    with JsonLines(folder) as sink:
        for step in (1, 2):
            sink.metrics(step, {})
    whole, inode = folder.metrics.read_bytes(), folder.metrics.stat().st_ino

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("os.fsync", full)
        JsonLines(folder, last_step=1)
    assert folder.metrics.read_bytes() == whole
    JsonLines(folder, last_step=1).close()
    assert folder.metrics.read_bytes() == whole.split(b"\n")[0] + b"\n"
    assert folder.metrics.stat().st_ino != inode


def test_a_cut_last_line_is_dropped_and_a_whole_one_without_its_end_gets_it(tmp_path):
    folder = RunFolder(tmp_path)
    for tail, steps in (
        (b'{"st', [1]),
        (b'{"step": 2}', [1, 2]),
        (b"\0\0\0", [1]),
        (b"\xff", [1]),
        (b"", [1]),
    ):
        folder.metrics.write_bytes(b'{"step": 1}\n' + tail)
        assert [row["step"] for row in folder.read_metrics()] == steps
        with JsonLines(folder, last_step=5) as sink:
            sink.metrics(6, {})
        assert [row["step"] for row in folder.read_metrics()] == [*steps, 6]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\x80\x81", r"not UTF-8 \(byte 1 of the line\)"),
        (b"{broken", "not JSON"),
        (b"[1, 2]", "a JSON list, but an object"),
        (b"3", "a JSON int, but an object"),
        (b"null", "a JSON NoneType, but an object"),
        (b"", "empty line"),
        (b'{"loss": 1}', "its step is None"),
        (b'{"step": "2"}', "its step is '2'"),
        (b'{"step": true}', "its step is True"),
        (b"[" * 5000, "not JSON"),
    ],
)
def test_a_damaged_line_is_named_with_file_line_and_remedy(tmp_path, line, reason):
    for path in (RunFolder(tmp_path).metrics, RunFolder(tmp_path).samples):
        content = b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
        path.write_bytes(content)
        with pytest.raises(BadInputError, match=rf"{path.name}:2: {reason}.*or delete the line"):
            list(read_steps(path))
        with pytest.raises(BadInputError, match=rf"{path.name}:2: {reason}"):
            JsonLines(RunFolder(tmp_path), last_step=1)
        assert path.read_bytes() == content
        path.unlink()


def test_data_files_are_split_at_newlines_only(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{number}{ODD}", "answer": ODD} for number in range(3)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("\r\n".join([*lines, '{"prompt":\r "carriage", "answer": ""}']).encode())
    raw = read_file(FileSource(source="jsonl", path=str(path)), str(path), "data.train.path")
    assert raw.bad == ()
    assert [row.prompt for row in raw.rows] == [*(row["prompt"] for row in rows), "carriage"]
    assert [row.place for row in raw.rows] == [f"{path}:{number}" for number in range(1, 5)]
    found = find_data(str(path), "train", Path(tmp_path))
    assert (found.columns, found.num_rows) == (("prompt", "answer"), 4)
