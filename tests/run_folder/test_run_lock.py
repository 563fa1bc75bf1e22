"""One process writes a run folder: real processes that race, die, and fall silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.processes import this_process
from rl_cluster.run_folder import lock as run_lock
from rl_cluster.run_folder.lock import LOCK, RunLock, holder_of

ROOT = Path(__file__).resolve().parents[2]
START = """
import sys, time
from pathlib import Path
from rl_cluster.config.reading.load import parse_config
from rl_cluster.errors import BadInputError
from rl_cluster.run_folder.folder import new_run_folder

folder = sys.argv[1]
config = parse_config({
    "run": {"name": "test", "dir": folder},
    "model": {"scratch": {}},
    "data": {"train": {"source": "addition"}},
    "rewards": {"scorers": [{"kind": "exact_match"}]},
})
print("ready", flush=True)
sys.stdin.readline()
try:
    with new_run_folder(config) as run:
        (run.path / "model").mkdir()
        print("won", flush=True)
        sys.stdin.readline()
        (run.path / "model" / "weights").write_text(sys.argv[2])
except BadInputError as error:
    print(f"lost {error}", flush=True)
"""
HOLD = """
import sys
from pathlib import Path
from rl_cluster.run_folder.lock import RunLock

RunLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""
TAKE_OVER = """
import sys
from pathlib import Path
from rl_cluster.errors import BadInputError
from rl_cluster.run_folder.lock import RunLock

print("ready", flush=True)
sys.stdin.readline()
try:
    RunLock.acquire(Path(sys.argv[1]))
    print("won", flush=True)
    sys.stdin.readline()
except BadInputError as error:
    print(f"lost {error}", flush=True)
"""


def process(code: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def hear(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def race(children: list[subprocess.Popen[str]]) -> list[str]:
    """All ready first, then all at once; what each said."""
    assert [hear(child) for child in children] == ["ready"] * len(children)
    for child in children:
        tell(child)
    return [hear(child) for child in children]


@pytest.mark.parametrize("folder_is_there", [False, True])
def test_of_racing_starts_exactly_one_wins_and_the_others_delete_nothing(tmp_path, folder_is_there):
    folder = tmp_path / "runs" / "one"
    if folder_is_there:
        folder.mkdir(parents=True)
    children = [process(START, str(folder), str(number)) for number in range(4)]
    said = race(children)
    assert sorted(line.split()[0] for line in said) == ["lost", "lost", "lost", "won"]
    winner = next(number for number, line in enumerate(said) if line == "won")
    pid = children[winner].pid
    assert all(f"process {pid} " in line or "is not empty" in line for line in said if line != "won")
    for child in children:
        if child is not children[winner]:
            assert child.wait(timeout=60) == 0
    assert {"config.yaml", "logs", "model", LOCK} <= {entry.name for entry in folder.iterdir()}
    tell(children[winner])
    assert children[winner].wait(timeout=60) == 0
    assert (folder / "model" / "weights").read_text() == str(winner)
    assert not (folder / LOCK).exists()


def test_a_held_lock_names_its_holder_and_the_remedy(tmp_path):
    child = process(HOLD, str(tmp_path))
    assert hear(child) == "held"
    with pytest.raises(BadInputError, match=rf"in use by process {child.pid} on .*choose another folder"):
        RunLock.acquire(tmp_path)
    assert holder_of(tmp_path) is not None
    tell(child)
    child.wait(timeout=60)
    RunLock.acquire(tmp_path).release()


def test_the_lock_of_a_killed_process_is_taken_over_at_once_even_before_it_is_reaped(tmp_path):
    child = process(HOLD, str(tmp_path))
    assert hear(child) == "held"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    lock = RunLock.acquire(tmp_path)
    assert json.loads((tmp_path / LOCK).read_bytes())["pid"] == os.getpid()
    lock.release()
    child.wait(timeout=60)


def test_of_several_that_find_a_dead_lock_exactly_one_gets_it(tmp_path):
    dead = process(HOLD, str(tmp_path))
    assert hear(dead) == "held"
    dead.kill()
    dead.wait(timeout=60)
    children = [process(TAKE_OVER, str(tmp_path)) for _ in range(5)]
    said = race(children)
    assert sorted(line.split()[0] for line in said) == ["lost"] * 4 + ["won"]
    tell(children[[line == "won" for line in said].index(True)])
    for child in children:
        child.wait(timeout=60)
    assert [entry.name for entry in tmp_path.iterdir()] in ([], [LOCK])


def lock_of_another_machine(folder: Path, silent_seconds: float) -> None:
    other = {"host": "node7", "realm": "0" * 8, "pid": os.getpid(), "started": 1.0, "token": "t"}
    file = folder / LOCK
    file.write_text(json.dumps(other))
    then = file.stat().st_mtime - silent_seconds
    os.utime(file, (then, then))


def test_the_lock_of_another_machine_holds_as_long_as_its_heart_beats(tmp_path):
    lock_of_another_machine(tmp_path, run_lock.STALE_SECONDS - 30)
    with pytest.raises(BadInputError, match=r"in use by process .* on node7"):
        RunLock.acquire(tmp_path)
    lock_of_another_machine(tmp_path, run_lock.STALE_SECONDS + 30)
    RunLock.acquire(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_id_that_was_given_out_again_does_not_hold_the_lock(tmp_path):
    me = this_process()
    past = {"host": me.host, "realm": me.realm, "pid": me.pid, "started": me.started - 1000, "token": "t"}
    (tmp_path / LOCK).write_text(json.dumps(past))
    assert holder_of(tmp_path) is None
    RunLock.acquire(tmp_path).release()


def test_the_heart_beats_and_a_lock_that_was_taken_over_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    lock = RunLock.acquire(tmp_path)
    file = tmp_path / LOCK
    os.utime(file, (1.0, 1.0))
    while file.stat().st_mtime == 1.0:
        pass
    lock.check()
    lock_of_another_machine(tmp_path, 0.0)
    lock._heart.join(timeout=60)
    with pytest.raises(CheckpointError, match="another process has taken over this run"):
        lock.check()
    lock.release()
    assert json.loads(file.read_bytes())["host"] == "node7", "what another holds is not removed"


def test_an_unreadable_lock_holds_until_it_is_silent_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "WRITING_SECONDS", 0.0)
    (tmp_path / LOCK).write_bytes(b"\x80")
    with pytest.raises(BadInputError, match="does not name"):
        RunLock.acquire(tmp_path)
    os.utime(tmp_path / LOCK, (1.0, 1.0))
    RunLock.acquire(tmp_path).release()


def test_a_lock_that_another_has_renewed_before_the_guard_was_made_is_not_removed(tmp_path, monkeypatch):
    lock_of_another_machine(tmp_path, run_lock.STALE_SECONDS + 30)
    genuine = run_lock._create

    def create(path, holder):
        made = genuine(path, holder)
        if made and path.name != LOCK:
            lock_of_another_machine(tmp_path, 0.0)
        return made

    monkeypatch.setattr(run_lock, "_create", create)
    with pytest.raises(BadInputError, match="on node7"):
        RunLock.acquire(tmp_path)
    assert json.loads((tmp_path / LOCK).read_bytes())["host"] == "node7"
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK]
