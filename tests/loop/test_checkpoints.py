"""Checkpoints are proven by SHA-256 before they are used: whatever is damaged is named and passed over."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.loop.checkpoints import (
    checkpoint_steps,
    choose_checkpoint,
    newest_checkpoint,
    problem_of,
    set_aside_later,
    step_of,
)
from rl_cluster.loop.fit import FitState
from rl_cluster.loop.state import Checkpointer, LoopState, seal
from tests.fakes import FakeLearner

STATE = LoopState(
    step=0,
    episode=8,
    ledger={"0": ("trained", 0, None)},
    stream={"position": 3},
    reissue=(1, 2),
    kl={"coef": 0.1},
    shaping={"count": 0, "mean": 0.0, "squared_deviations": 0.0},
    scores={},
)


def write(
    folder: Path, *steps: int, keep_last: int = 99, scores: dict[str, float] | None = None
) -> Checkpointer:
    checkpointer = Checkpointer(folder, keep_last, keep_best=True)
    for step in steps:
        save(checkpointer, step, scores or {})
    return checkpointer


def save(checkpointer: Checkpointer, step: int, scores: dict[str, float]) -> None:
    state = LoopState(**{**vars(STATE), "step": step})
    asyncio.run(checkpointer.write(state, FakeLearner(), None))
    checkpointer.finish(step, scores)


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(bytes(data))


def edit(folder: Path, **values: Any) -> None:
    """loop.json with other values, and a manifest that agrees."""
    file = folder / "loop.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    (folder / "manifest.json").unlink()
    from rl_cluster.files.manifest import write_manifest

    write_manifest(folder)


def test_the_manifest_has_size_and_sha256_of_every_file(tmp_path: Path) -> None:
    write(tmp_path, 2)
    folder = tmp_path / "step-2"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {"loop.json", "scores.json", "learner/weight.json"}
    for name, record in files.items():
        data = (folder / name).read_bytes()
        assert record == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert problem_of(folder) is None


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "two flipped bits": (
        lambda f: (flip(f / "learner/weight.json", 1), flip(f / "learner/weight.json", 2)),
        "SHA-256",
    ),
    "a flipped bit of loop.json": (lambda f: flip(f / "loop.json", 12), "loop.json has changed"),
    "a truncated file": (lambda f: (f / "learner/weight.json").write_text("["), "has 1 bytes instead of"),
    "an empty file": (lambda f: (f / "learner/weight.json").write_bytes(b""), "has 0 bytes"),
    "a missing file": (lambda f: (f / "learner/weight.json").unlink(), "learner/weight.json is missing"),
    "no learner state": (lambda f: shutil.rmtree(f / "learner"), "learner/weight.json is missing"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "no loop.json": (lambda f: (f / "loop.json").unlink(), "loop.json is missing"),
    "nothing at all": (lambda f: (shutil.rmtree(f), f.mkdir()), "manifest.json is missing"),
    "a torn manifest": (lambda f: (f / "manifest.json").write_text('{"format": 1, "fi'), "manifest.json: "),
    "an empty manifest": (
        lambda f: (f / "manifest.json").write_text('{"format":1,"files":{}}'),
        "does not list",
    ),
    "a binary manifest": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json: "),
    "a manifest of another kind": (lambda f: (f / "manifest.json").write_text("[1]"), "manifest.json: "),
    "a folder in a file's place": (
        lambda f: ((f / "learner/weight.json").unlink(), (f / "learner/weight.json").mkdir()),
        "learner/weight.json is missing",
    ),
    "step as text": (lambda f: edit(f, step="4"), "step: "),
    "step true": (lambda f: edit(f, step=True), "step: "),
    "step below 0": (lambda f: edit(f, step=-5), "step: "),
    "another step": (lambda f: edit(f, step=3), "says step 3, the folder 4"),
    "step 4.0": (lambda f: edit(f, step=4.5), "step: "),
    "reissue null": (lambda f: edit(f, reissue=None), "reissue: "),
    "reissue of text": (lambda f: edit(f, reissue=["1"]), "reissue.0: "),
    "ledger as a list": (lambda f: edit(f, ledger=[1]), "ledger: "),
    "an entry of the ledger too short": (lambda f: edit(f, ledger={"0": ["trained"]}), "ledger.0"),
    "a group with another name": (lambda f: edit(f, ledger={"²": ["trained", 0, None]}), "ledger.²"),
    "no position": (lambda f: edit(f, stream={}), "position: "),
    "position as text": (lambda f: edit(f, stream={"position": "3"}), "position: "),
    "no coefficient": (lambda f: edit(f, kl={}), "coef: "),
    "moments as text": (
        lambda f: edit(f, shaping={"count": "0", "mean": 0.0, "squared_deviations": 0.0}),
        "count",
    ),
    "scores as text": (lambda f: (f / "scores.json").unlink() or edit(f, scores={"4": "good"}), "scores.4"),
    "an unknown field": (lambda f: edit(f, surprise=1), "surprise"),
    "an unknown format": (lambda f: edit(f, format=9), "format is 9"),
}


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_taken(tmp_path: Path, kind: str) -> None:
    write(tmp_path, 1, 2, 4)
    damage, words = DAMAGE[kind]
    damage(tmp_path / "step-4")
    with pytest.warns(UserWarning, match="step-4 is damaged") as caught:
        chosen = choose_checkpoint(tmp_path, LoopState.read)
    assert (chosen.path, chosen.state.step) == (tmp_path / "step-2", 2)
    assert words in str(caught[0].message)
    assert words in chosen.notes[0]
    assert "Going on from step-2" in chosen.notes[0]
    with pytest.raises(BadInputError) as refused:
        choose_checkpoint(tmp_path, LoopState.read, step=4)
    assert words in str(refused.value)
    assert "of the steps: 1, 2, 4 (damaged: " in str(refused.value)


def test_where_none_is_whole_the_error_names_each_with_its_fault(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    flip(tmp_path / "step-1" / "learner" / "weight.json")
    (tmp_path / "step-2" / "loop.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        choose_checkpoint(tmp_path, LoopState.read)
    assert "step-1: learner/weight.json has changed" in str(caught.value)
    assert "step-2: loop.json is missing" in str(caught.value)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        choose_checkpoint(tmp_path / "nowhere", LoopState.read)


STRANGE = "step-² step-99999999999999999999 step--5 step-007 step-+1 step-1_0 step- step-3x step-٣ Step-3"


@pytest.mark.parametrize("name", [*STRANGE.split(), "step- 3", "step-1\n"])
def test_strange_names_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    write(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / name)
    assert step_of(name) is None
    assert checkpoint_steps(tmp_path) == [1]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-1"
    checkpointer = write(tmp_path, 2, 3, keep_last=1)
    assert (tmp_path / name).is_dir(), "and they are nobody's to delete"
    assert checkpoint_steps(tmp_path) == [3]
    del checkpointer


def test_a_file_in_a_checkpoints_place_is_none(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-5").write_text("")
    assert newest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_an_exact_step_is_taken_or_refused_with_the_list(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 4)
    assert choose_checkpoint(tmp_path, LoopState.read, step=2).state.step == 2
    with pytest.raises(BadInputError, match=r"step = 3: there is none .*of the steps: 1, 2, 4\."):
        choose_checkpoint(tmp_path, LoopState.read, step=3)
    with pytest.raises(BadInputError, match="of the steps: none"):
        choose_checkpoint(tmp_path / "nowhere", LoopState.read, step=3)


def test_rotation_counts_only_whole_checkpoints(tmp_path: Path) -> None:
    checkpointer = write(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-3" / "learner" / "weight.json")
    rotating = Checkpointer(tmp_path, keep_last=2, keep_best=False)
    save(rotating, 4, {})
    assert checkpoint_steps(tmp_path) == [2, 3, 4], "3 is damaged, so 2 and 4 are the last two"
    flip(tmp_path / "step-4" / "loop.json", 5)
    save(rotating, 5, {})
    assert checkpoint_steps(tmp_path) == [2, 3, 4, 5], "damaged after it was written by this very process"
    save(rotating, 6, {})
    assert checkpoint_steps(tmp_path) == [5, 6]
    del checkpointer


def test_a_damaged_checkpoint_is_not_the_best(tmp_path: Path) -> None:
    scores = {"1": 0.9, "2": 0.8, "3": 0.1, "4": 0.1}
    write(tmp_path, 1, 2, 3, scores=scores)
    flip(tmp_path / "step-1" / "learner" / "weight.json")
    save(Checkpointer(tmp_path, keep_last=1, keep_best=True), 4, scores)
    assert checkpoint_steps(tmp_path) == [2, 4]


def test_a_checkpoint_that_a_hook_wants_is_kept_beside_the_best_by_score(tmp_path: Path) -> None:
    scores = {"1": 0.1, "2": 0.9, "3": 0.2, "4": 0.3}
    checkpointer = write(tmp_path, 1, 2, 3, scores=scores)
    asyncio.run(checkpointer.write(LoopState(**{**vars(STATE), "step": 4}), FakeLearner(), None))
    checkpointer._keep_last = 1
    checkpointer.finish(4, scores, {1, None})
    assert checkpoint_steps(tmp_path) == [1, 2, 4]


def test_what_is_added_is_sealed_and_damage_done_before_is_not_blessed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    folder = tmp_path / "step-1"
    (folder / "trainer_state.json").write_text("{}")
    assert problem_of(folder) is None
    flip(folder / "learner" / "weight.json")
    seal(folder)
    assert "learner/weight.json has changed" in str(problem_of(folder))
    flip(folder / "learner" / "weight.json")
    assert problem_of(folder) is None
    flip(folder / "trainer_state.json")
    assert "trainer_state.json has changed" in str(problem_of(folder))


def test_the_score_of_the_evaluation_after_the_checkpoint_is_in_it(tmp_path: Path) -> None:
    write(tmp_path, 3, scores={"3": 0.5})
    assert json.loads((tmp_path / "step-3" / "loop.json").read_text())["scores"] == {}
    assert LoopState.read(tmp_path / "step-3").scores == {"3": 0.5}


def test_later_checkpoints_are_set_aside_and_not_deleted(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 4)
    assert set_aside_later(tmp_path, 2) == [tmp_path / "set-aside" / "step-4"]
    assert checkpoint_steps(tmp_path) == [1, 2]
    write(tmp_path, 4)
    assert set_aside_later(tmp_path, 2) == [tmp_path / "set-aside" / "step-4.2"]
    assert problem_of(tmp_path / "set-aside" / "step-4") is None
    assert set_aside_later(tmp_path, 2) == []


def old_format(folder: Path, step: int, ranks: int = 2) -> Path:
    """As checkpoints were before they had a manifest."""
    learner = folder / f"step-{step}" / "learner"
    learner.mkdir(parents=True)
    state = {"step": step, "fingerprint": "f", "scores": {}}
    (learner.parent / "loop.json").write_text(json.dumps(state))
    (learner / "learner.json").write_text(json.dumps({"world_size": ranks}))
    for rank in range(ranks):
        torch.save({"engine": torch.arange(1000.0)}, learner / f"rank-{rank}.pt")
    return learner.parent


def test_a_checkpoint_of_the_format_before_is_taken_with_a_warning(tmp_path: Path) -> None:
    old_format(tmp_path, 3)
    with pytest.warns(UserWarning, match=r"has no manifest\.json: it was written by an earlier version"):
        assert choose_checkpoint(tmp_path, FitState.read).state.step == 3


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "learner" / "rank-1.pt").unlink(), "rank-1.pt cannot be read"),
        (lambda f: shutil.rmtree(f / "learner"), "no learner state"),
        (lambda f: flip(f / "learner" / "rank-0.pt", 1500), "rank-0.pt is damaged"),
        (lambda f: (f / "learner" / "rank-0.pt").write_bytes(b"PK"), "rank-0.pt cannot be read"),
        (lambda f: (f / "learner" / "learner.json").write_text("[]"), "no learner state"),
        (lambda f: (f / "learner" / "learner.json").write_text('{"world_size": "2"}'), "world_size is '2'"),
        (lambda f: (f / "loop.json").write_text('{"step": "3"}'), "step: "),
        (lambda f: (f / "loop.json").write_text("[]"), "manifest.json is missing"),
    ],
)
def test_a_damaged_one_of_the_format_before_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    old_format(tmp_path, 1)
    damage(old_format(tmp_path, 3))
    with pytest.warns(UserWarning, match="step-3 is damaged") as caught:
        assert choose_checkpoint(tmp_path, FitState.read).state.step == 1
    assert any(words in str(warning.message) for warning in caught)
