"""What the command line leaves alone: the user's own files, and the runs of other processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_cluster.cli.commands import train_command
from rl_cluster.cli.fit import fit_command
from rl_cluster.config.fit import FitConfig
from rl_cluster.config.reading.load import load_config
from rl_cluster.errors import BadInputError
from rl_cluster.run_folder.folder import open_run_folder
from rl_cluster.run_folder.lock import LOCK
from tests.run_folder.test_run_lock import HOLD, hear, process, tell

RECIPE = """
run: {steps: 2}
model: {scratch: {hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 32, max_positions: 24}}
data: {train: {source: jsonl, path: DATA}, held_out: 2, max_prompt_tokens: 16}
rewards: {scorers: [{kind: exact_match}]}
batch: {prompts_per_step: 2, samples_per_prompt: 2}
rollout: {max_new_tokens: 3}
eval: {num_prompts: 2}
checkpoint: {every: 1}
cluster: {backend: local, device: cpu, cpus_per_worker: 1}
log: {progress: none, tensorboard: false}
"""
FIT = """
run: {epochs: 1}
objective: {name: sft}
model: {scratch: {hidden_size: 32, num_layers: 1, num_heads: 2, intermediate_size: 32, max_positions: 24}}
data: {source: jsonl, path: DATA}
batch: {rows_per_step: 4}
checkpoint: {every: 1}
cluster: {backend: local, device: cpu, cpus_per_worker: 1}
log: {progress: none, tensorboard: false}
"""
SUMS = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(a + b)} for a in range(4) for b in (1, 2)
]
Files = dict[str, bytes | None]


def files(folder: Path) -> Files:
    """Everything below, with its content."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


class Command:
    """`train` or `fit` of one recipe: start(…), resume(…)."""

    def __init__(self, kind: str, tmp_path: Path) -> None:
        self.kind, self.data, self.folder = kind, tmp_path / "rows.jsonl", tmp_path / "run"
        self.recipe = tmp_path / "recipe.yaml"
        text = RECIPE if kind == "train" else FIT
        self.recipe.write_text(text.replace("DATA", str(self.data)))
        write_rows(self.data, SUMS)
        self.path_setting = "data.train.path" if kind == "train" else "data.path"
        self._call: Callable[..., None] = train_command if kind == "train" else fit_command

    def start(self, folder: Path | None = None, *overrides: str) -> None:
        words = [f"run.dir={folder or self.folder}", *overrides]
        self._call(str(self.recipe), words, dry_run=False, resume=None)

    def resume(self, folder: Path | None = None, *overrides: str) -> None:
        more = "run.steps=3" if self.kind == "train" else "run.epochs=2"
        self._call(None, [more, *overrides], dry_run=False, resume=folder or self.folder)

    def steps(self, folder: Path | None = None) -> list[int]:
        return [row["step"] for row in open_run_folder(folder or self.folder).read_metrics() if row["step"]]


@pytest.fixture(params=["train", "fit"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Command:
    return Command(request.param, tmp_path)


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[int]:
    child = process(HOLD, str(folder))
    assert hear(child) == "held"
    try:
        yield child.pid
    finally:
        tell(child)
        child.wait(timeout=60)


@pytest.mark.parametrize("place", ["start/thesis.tex", "logs/thesis.tex", "thesis.tex", "start/deep/er/a"])
def test_a_refused_start_leaves_every_file_of_the_user(command: Command, tmp_path: Path, place: str) -> None:
    project = tmp_path / "proj"
    (project / place).parent.mkdir(parents=True)
    (project / place).write_text("years of work")
    before = files(project)
    write_rows(command.data, [SUMS[0], "{broken"])
    with pytest.raises(BadInputError):
        command.start(project)
    assert files(project) == before


@pytest.mark.parametrize("trainer", ["ppo", "sft", "reward"])
@pytest.mark.parametrize("place", ["start/thesis.tex", "start/pairs.jsonl", "thesis.tex"])
def test_llm_leaves_every_file_of_the_user(
    llm: Callable[..., tuple[int, str, str]], tmp_path: Path, trainer: str, place: str
) -> None:
    project = tmp_path / "proj"
    (project / place).parent.mkdir(parents=True)
    (project / place).write_text("years of work")
    before = files(project)
    write_rows(tmp_path / "bad.jsonl", [*SUMS, "{broken"])
    words = (
        f"--train --model tiny --trainer {trainer} --data-path {tmp_path}/bad.jsonl --project-name {project}"
    )
    assert llm(words)[0] == 2
    assert files(project) == before


def test_llm_takes_back_what_it_had_prepared_and_nothing_else(
    llm: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    project = tmp_path / "deep" / "proj"
    words = f"--train --model tiny --trainer reward --data-path labels.jsonl --project-name {project}"
    assert llm(words, "optimizer.learning_rate=-1")[0] == 2
    assert list(tmp_path.iterdir()) == []
    project.mkdir(parents=True)
    assert llm(words, "optimizer.learning_rate=-1")[0] == 2
    assert list(project.iterdir()) == []


def test_a_refused_start_takes_back_the_folders_above_that_it_made(command: Command, tmp_path: Path) -> None:
    write_rows(command.data, [SUMS[0], "{broken"])
    before = files(tmp_path)
    with pytest.raises(BadInputError, match=r"rows\.jsonl:2"):
        command.start(tmp_path / "a" / "b" / "run")
    assert files(tmp_path) == before


def test_a_file_that_appears_during_a_start_is_not_deleted_with_it(
    command: Command, monkeypatch: Any
) -> None:
    """The user works in the folder at the same time."""
    from rl_cluster.metrics import sink

    genuine = sink.JsonLines.__init__

    def meanwhile(self: Any, folder: Any, last_step: Any = None) -> None:
        genuine(self, folder, last_step)
        (folder.path / "notes.txt").write_text("mine")
        raise BadInputError("something found late")

    monkeypatch.setattr(sink.JsonLines, "__init__", meanwhile)
    with pytest.raises(BadInputError, match="found late"):
        command.start()
    assert files(command.folder) == {"notes.txt": b"mine"}


def test_a_run_in_use_is_neither_started_nor_resumed_by_another(command: Command) -> None:
    command.start()
    done = command.steps()
    with held_by_another_process(command.folder) as pid:
        before = files(command.folder)
        with pytest.raises(BadInputError, match=f"in use by process {pid}"):
            command.resume()
        with pytest.raises(BadInputError, match=f"in use by process {pid}"):
            command.start()
        assert files(command.folder) == before
    command.resume()
    assert len(command.steps()) > len(done)
    assert not (command.folder / LOCK).exists()


def test_the_run_of_a_process_that_was_killed_is_resumed_at_once(command: Command) -> None:
    command.start()
    child = process(HOLD, str(command.folder))
    assert hear(child) == "held"
    child.kill()
    child.wait(timeout=60)
    assert (command.folder / LOCK).exists()
    command.resume()


def test_a_moved_data_file_is_resumed_and_changed_content_is_refused(
    command: Command, tmp_path: Path
) -> None:
    command.start()
    moved = tmp_path / "elsewhere" / "the rows.jsonl"
    moved.parent.mkdir()
    command.data.rename(moved)
    before = files(command.folder)
    with pytest.raises(BadInputError, match=command.path_setting.replace(".", r"\.")):
        command.resume()
    write_rows(tmp_path / "other.jsonl", [{**SUMS[0], "answer": "9", "completion": "9"}, *SUMS[1:]])
    with pytest.raises(BadInputError, match=r"(data\.train|data\.path).*rows may not change"):
        command.resume(None, f"{command.path_setting}={tmp_path / 'other.jsonl'}")
    assert files(command.folder).keys() == before.keys()
    command.resume(None, f"{command.path_setting}='{moved}'")
    assert command.steps() == list(range(1, max(command.steps()) + 1))


def test_a_moved_run_folder_is_resumed(command: Command, tmp_path: Path) -> None:
    command.start()
    new = tmp_path / "archive" / "renamed"
    new.parent.mkdir()
    command.folder.rename(new)
    command.resume(new)
    assert max(command.steps(new)) > 2 or command.kind == "fit"
    assert not command.folder.exists()


def test_a_moved_project_of_llm_finds_its_prepared_files(
    llm: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--train --model tiny --trainer reward --data-path labels.jsonl --epochs 1 --batch-size 4"
    local = ["cluster.backend=local", "cluster.cpus_per_worker=1", "checkpoint.every=1", "log.progress=none"]
    assert llm(f"{words} --project-name {tmp_path}/one", *local)[0] == 0
    (tmp_path / "one").rename(tmp_path / "two")
    code, _, said = llm(f"--train --resume {tmp_path}/two", "run.epochs=2")
    assert code == 0, said
    config = open_run_folder(tmp_path / "two").read_config_as(FitConfig)
    assert config.data.path == str(tmp_path / "two" / "start" / "pairs.jsonl")
    assert config.run.dir == str(tmp_path / "two")


def test_the_configuration_of_a_run_names_its_folder_absolutely(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.kind == "fit":
        return
    monkeypatch.chdir(tmp_path)
    command.start(Path("here"))
    assert load_config(tmp_path / "here" / "config.yaml").run.dir == str(tmp_path / "here")


def test_a_dry_run_leaves_no_lock_and_no_folder(
    llm: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    from rl_cluster.run_folder import claim as run_claim

    words = f"--train --model tiny --trainer sft --data-path sft.jsonl --project-name {tmp_path / 'run'}"
    assert llm(f"{words} --dry-run")[0] == 0
    assert run_claim._CLAIMS == {}
    assert list(tmp_path.iterdir()) == []
