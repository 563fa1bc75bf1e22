"""Folders are replaced whole, whatever the moment of a crash, and only folders of ours are."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rl_cluster.errors import BadInputError
from rl_cluster.files import atomic as atomic_files
from rl_cluster.files.atomic import folder_atomically, recover_folder, recover_folders_in
from rl_cluster.files.own_folders import MARKER

ROOT = Path(__file__).resolve().parents[2]
# Replaces a folder, and dies without a word at the given call that changes the disk.
REPLACE = """
import os, shutil, sys
from pathlib import Path
from rl_cluster.files import atomic as atomic_files

fatal = int(sys.argv[2])
calls = 0

def mortal(function):
    def call(*words, **named):
        global calls
        calls += 1
        if calls == fatal:
            os._exit(7)
        return function(*words, **named)
    return call

Path.rename = mortal(Path.rename)
shutil.rmtree = mortal(shutil.rmtree)
os.fsync = mortal(os.fsync)
os.unlink = mortal(os.unlink)
with atomic_files.folder_atomically(Path(sys.argv[1]), "model") as fresh:
    for name in ("a", "b"):
        (fresh / name).write_text("new")
"""


def write(target: Path, text: str, kind: str = "model") -> None:
    with folder_atomically(target, kind) as fresh:
        for name in ("a", "b"):
            (fresh / name).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in ("a", "b")}


def replace_and_die(target: Path, fatal: int) -> int:
    words = [sys.executable, "-c", textwrap.dedent(REPLACE), str(target), str(fatal)]
    return subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode


def test_a_death_at_any_point_leaves_the_old_or_the_new_and_the_next_opening_finds_it(tmp_path):
    states, fatal, code = set(), 0, 7
    while code == 7:
        fatal += 1
        place = tmp_path / str(fatal)
        target = place / "model"
        write(target, "old")
        code = replace_and_die(target, fatal)
        recover_folders_in(place)
        assert [entry.name for entry in place.iterdir()] == ["model"], "what the dead left is removed"
        found = contents(target)
        assert found in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"})
        states.add(found["a"])
    assert code == 0
    assert fatal > 5
    assert states == {"old", "new"}
    assert found["a"] == "new"


def test_everything_is_on_the_disk_before_the_renames_and_the_old_goes_last(tmp_path, monkeypatch):
    target = tmp_path / "model"
    write(target, "old")
    events: list[str] = []

    def noting(name, function):
        def call(*words, **named):
            events.append(name)
            return function(*words, **named)

        return call

    monkeypatch.setattr(atomic_files, "_sync_file", noting("file", atomic_files._sync_file))
    monkeypatch.setattr(atomic_files, "_sync_folder", noting("folder", atomic_files._sync_folder))
    monkeypatch.setattr(Path, "rename", noting("rename", Path.rename))
    monkeypatch.setattr(atomic_files.shutil, "rmtree", noting("delete", atomic_files.shutil.rmtree))
    with folder_atomically(target, "model") as fresh:
        (fresh / "inner").mkdir()
        (fresh / "inner" / "a").write_text("new")
    swap = events.index("rename")
    assert sorted(events[:swap]) == ["file"] * 2 + ["folder"] * 2, "the file, the marker, both folders"
    assert events[swap : swap + 4] == ["rename", "rename", "folder", "delete"]


def test_what_a_living_process_has_there_is_left_alone(tmp_path):
    target = tmp_path / "model"
    write(target, "old")
    with folder_atomically(target, "model") as mine:
        (mine / "a").write_text("mine")
        write(target, "other")
        recover_folder(target)
        assert (mine / "a").read_text() == "mine"
        (mine / "b").write_text("mine")
    assert contents(target) == {"a": "mine", "b": "mine"}


def test_leftovers_of_another_machine_are_removed_only_when_nothing_has_happened_for_long(
    tmp_path, monkeypatch
):
    other = tmp_path / ".model.new-00000000-5-1-0123abcd"
    other.mkdir()
    recover_folder(tmp_path / "model")
    assert other.is_dir()
    monkeypatch.setattr(atomic_files, "UNKNOWN_NEW_SECONDS", -1.0)
    recover_folder(tmp_path / "model")
    assert not other.exists()


def test_a_folder_of_somebody_else_is_not_replaced_and_stays_as_it_was(tmp_path):
    target = tmp_path / "thesis"
    (target / "nested").mkdir(parents=True)
    (target / "nested" / "a.tex").write_text("years of work")
    with pytest.raises(BadInputError, match="not of this project, so it is not replaced"):
        write(target, "new")
    assert (target / "nested" / "a.tex").read_text() == "years of work"
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis"]


def test_a_folder_that_somebody_fills_while_ours_is_written_is_not_replaced(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(BadInputError, match="not replaced"), folder_atomically(target, "model") as fresh:
        (fresh / "a").write_text("new")
        target.mkdir()
        (target / "mine").write_text("mine")
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_a_folder_of_another_kind_is_not_replaced(tmp_path):
    write(tmp_path / "step", "old", "checkpoint")
    with pytest.raises(BadInputError, match="is a checkpoint, not a model"):
        write(tmp_path / "step", "new", "model")
    assert contents(tmp_path / "step") == {"a": "old", "b": "old"}


def test_what_others_have_put_into_a_folder_of_ours_moves_over(tmp_path):
    target = tmp_path / "model"
    with folder_atomically(target, "model") as fresh:
        (fresh / "a").write_text("old")
        (fresh / "only old").write_text("old")
    (target / "notes").mkdir()
    (target / "notes" / "mine.txt").write_text("mine")
    (target / "link").symlink_to(tmp_path)
    write(target, "new")
    assert contents(target) == {"a": "new", "b": "new"}
    assert (target / "notes" / "mine.txt").read_text() == "mine"
    assert (target / "link").is_symlink()
    assert not (target / "only old").exists()
    write(target, "newer")
    assert (target / "notes" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["symlink", "dangling", "file", "below a file", "here", "above", "root"])
def test_what_is_no_folder_of_its_own_is_refused(tmp_path, monkeypatch, kind):
    (tmp_path / "real").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "symlink").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "up" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "up" / "here")
    target = {
        "below a file": tmp_path / "file" / "model",
        "here": Path.cwd(),
        "above": tmp_path / "up",
        "root": Path("/"),
    }.get(kind, tmp_path / kind)
    with pytest.raises(BadInputError, match="Give a"):
        write(target, "new")
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "real").iterdir()) == []


def test_the_marker_is_the_only_thing_that_is_added(tmp_path):
    write(tmp_path / "model", "new")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [MARKER, "a", "b"]
