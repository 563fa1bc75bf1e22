"""The run folder: refused where it cannot be, written atomically, read back."""

import errno
import os
from datetime import datetime
from pathlib import Path

import pytest

from rl_cluster.config.reading.load import parse_config
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.files.atomic import folder_atomically, write_atomically
from rl_cluster.run_folder import folder as folder_module
from rl_cluster.run_folder.claim import check_unused
from rl_cluster.run_folder.folder import (
    RunFolder,
    create_run_folder,
    new_run_folder,
    open_run_folder,
    preparing_run,
    resolve_run_dir,
)


def config_in(folder):
    return parse_config(
        {
            "run": {"name": "test", "dir": None if folder is None else str(folder)},
            "model": {"scratch": {}},
            "data": {"train": {"source": "addition"}},
            "rewards": {"scorers": [{"kind": "exact_match"}]},
        }
    )


def test_a_new_run_folder_holds_the_resolved_config(tmp_path):
    config = config_in(tmp_path / "run")
    folder = create_run_folder(config)
    assert folder.read_config() == config
    assert open_run_folder(tmp_path / "run") == folder
    with pytest.raises(BadInputError, match="is not empty"):
        create_run_folder(config)


def test_the_default_folder_is_named_after_run_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 1, 2, 3, 4, 5)
    first = resolve_run_dir(config_in(None), now)
    assert first.run.dir == "runs/test-20260102-030405"
    os.makedirs(first.run.dir)
    assert resolve_run_dir(config_in(None), now).run.dir == "runs/test-20260102-030405-2"
    assert resolve_run_dir(first, now) is first


def test_a_read_only_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(BadInputError, match="read-only"):
        check_unused(tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="is a file"):
        create_run_folder(config_in(tmp_path / "file" / "run"))


def test_a_full_disk_leaves_neither_half_a_file_nor_a_temporary_one(tmp_path, monkeypatch):
    target = tmp_path / "state.json"
    write_atomically(target, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_full_disk_at_a_checkpoint_is_a_checkpoint_error(tmp_path):
    target = tmp_path / "step-2"
    with folder_atomically(target) as partial:
        (partial / "weights").write_text("two")
    with pytest.raises(CheckpointError, match="Free space"), folder_atomically(target) as partial:
        (partial / "weights").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (target / "weights").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


def test_another_failure_is_passed_on_and_cleaned_up(tmp_path):
    with pytest.raises(KeyError), folder_atomically(tmp_path / "step-1") as partial:
        (partial / "x").write_text("")
        raise KeyError("x")
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_read_up_to_a_line_that_a_crash_cut_short(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert folder.read_metrics() == [{"step": 1}, {"step": 2}]
    with pytest.raises(BadInputError, match=r"no metrics\.jsonl"):
        RunFolder(tmp_path / "other").read_metrics()


def test_of_starts_that_choose_the_same_name_each_gets_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two commands in one second: both find the name free before either has made the folder."""
    monkeypatch.chdir(tmp_path)
    moment = datetime(2026, 1, 2, 3, 4, 5)
    faster = iter(["runs/test-20260102-030405", "runs/test-20260102-030405-2"])

    def resolve(config: RunConfig) -> RunConfig:
        resolved = resolve_run_dir(config, moment)
        for taken in faster:  # another process is there in between
            Path(taken).mkdir(parents=True)
            (Path(taken) / "metrics.jsonl").write_text("theirs")
            break
        return resolved

    monkeypatch.setattr(folder_module, "resolve_run_dir", resolve)
    with preparing_run(config_in(None)) as config, new_run_folder(config) as folder:
        assert folder.path == tmp_path / "runs" / "test-20260102-030405-3"
    assert (tmp_path / "runs" / "test-20260102-030405" / "metrics.jsonl").read_text() == "theirs"


def test_a_name_that_cannot_be_written_is_no_name_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(BadInputError, match="is a file"), preparing_run(config_in(None)):
        pass
