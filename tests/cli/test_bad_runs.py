"""`train` on input that is bad in ways only the run can see: one message, exit code 2, nothing left."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_cluster.cli.commands import train_command
from rl_cluster.cli.failures import run_guarded
from rl_cluster.config.run import ScratchModel
from rl_cluster.modeling.scratch import save_scratch_model

RECIPE = """
run: {steps: 3}
model: {path: MODEL}
data: {train: {source: jsonl, path: DATA}, held_out: 0, max_prompt_tokens: 40}
rewards: {scorers: [{kind: exact_match}]}
rollout: {max_new_tokens: 8}
cluster: {device: cpu}
log: {progress: none}
"""
GOOD_ROW = {"prompt": "12+34=", "answer": "46"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_scratch_model(ScratchModel(hidden_size=64, num_layers=1, num_heads=2, max_positions=48), folder, 0)
    return folder


@pytest.fixture
def train(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, Path]]:
    """train(rows, *overrides) -> exit code, what stderr says, and the run folder that was asked for."""

    def call(rows: list[Any], *overrides: str) -> tuple[int, str, Path]:
        data, recipe, folder = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml", tmp_path / "new" / "run"
        data.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        recipe.write_text(RECIPE.replace("MODEL", str(model)).replace("DATA", str(data)))
        words = [f"run.dir={folder}", *overrides]
        with pytest.raises(SystemExit) as ended:
            run_guarded(lambda: train_command(str(recipe), words, dry_run=False, resume=None))
        return int(str(ended.value.code)), capsys.readouterr().err, folder

    return call


@pytest.mark.parametrize(
    ("rows", "overrides", "parts"),
    [
        ([GOOD_ROW, "{broken"], [], ["rows.jsonl:2", "data.on_bad_row"]),
        ([GOOD_ROW, {"question": "1+1="}], [], ["rows.jsonl:2", "prompt"]),
        ([GOOD_ROW, {"prompt": " ", "answer": "1"}], [], ["rows.jsonl:2"]),
        ([], [], ["rows.jsonl", "the data set is empty"]),
        (["{broken"], ["data.on_bad_row=skip"], ["rows.jsonl"]),
        ([GOOD_ROW, {"prompt": "1" * 45, "answer": "1"}], [], ["rows.jsonl:2", "45 tokens"]),
        ([{"prompt": "1+1="}], [], ["rows.jsonl:1", "answer"]),
        ([GOOD_ROW], ["data.held_out=1", "eval.num_prompts=1"], ["data.held_out"]),
        ([GOOD_ROW], ["model.path=/no/such/model"], ["model.path", "no such folder"]),
        ([GOOD_ROW], ["rewards.scorers=[{kind: function, function: no_such_module:f}]"], ["no_such_module"]),
        ([GOOD_ROW], ["rewards.scorers=[{kind: function, function: 'json:nothing'}]"], ["nothing"]),
        ([GOOD_ROW], ["batch.prompts_per_step=many"], ["batch.prompts_per_step", "many"]),
        ([GOOD_ROW], ["batch.promts_per_step=2"], ["Did you mean batch.prompts_per_step?"]),
        ([GOOD_ROW], ["rollout.num_workers=999"], ["rollout.num_workers = 999", "cores"]),
        ([GOOD_ROW], ["cluster.num_gpus_per_node=1", "cluster.device=cuda"], ["need 2 GPUs"]),
    ],
)
def test_bad_input_is_named_and_leaves_no_run_folder(
    train: Callable[..., tuple[int, str, Path]], rows: list[Any], overrides: list[str], parts: list[str]
) -> None:
    code, said, folder = train(rows, *overrides)
    assert code == 2, said
    for part in parts:
        assert part in said
    assert said.startswith("bad input:")
    assert "Traceback" not in said
    assert not folder.exists()


def test_a_tokenizer_without_an_end_token_is_named(
    train: Callable[..., tuple[int, str, Path]], model: Path, tmp_path: Path
) -> None:
    other = _with_tokenizer(model, tmp_path, eos_token=None)
    code, said, folder = train([GOOD_ROW], f"model.path={other}")
    assert (code, folder.exists()) == (2, False)
    assert "has no eos token" in said


def test_a_cluster_that_does_not_answer_is_named(
    train: Callable[..., tuple[int, str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself is replaced: its own attempts to connect take most of a minute."""
    import ray

    def refuse(**options: Any) -> None:
        raise ConnectionError(f"nobody at {options['address']}")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    code, said, folder = train([GOOD_ROW])
    assert (code, folder.exists()) == (2, False)
    assert "RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers there" in said


def test_a_port_that_another_program_uses_is_named_instead_of_waited_for(
    train: Callable[..., tuple[int, str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself is replaced: at a port that says nothing it waits for more than three minutes."""
    import ray

    from rl_cluster.assembly import session

    over = threading.Event()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: over.wait(60))
    monkeypatch.setattr(session, "CONNECT_SECONDS", 0.2)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:8080")
    code, said, folder = train([GOOD_ROW])
    over.set()
    assert (code, folder.exists()) == (2, False)
    assert "RAY_ADDRESS=127.0.0.1:8080: no Ray cluster answers there (the port is open" in said


def test_the_same_folder_serves_the_corrected_command(
    train: Callable[..., tuple[int, str, Path]], tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "run"
    folder.mkdir(parents=True)
    for _ in range(2):
        code, said, _ = train(["{broken"])
        assert (code, "is not empty" in said) == (2, False)
        assert list(folder.iterdir()) == [], "a folder that the user made stays, and stays empty"


def _with_tokenizer(model: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of the model whose tokenizer_config.json is changed."""
    import shutil

    other = tmp_path / "other"
    shutil.copytree(model, other)
    file = other / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return other
