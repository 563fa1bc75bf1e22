"""What the library's fronts replace, what they leave alone, and who may write a run's folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rl_cluster
from rl_cluster.errors import BadInputError
from rl_cluster.files.own_folders import MARKER
from rl_cluster.pipeline.pipeline import ForwardBackwardPipeline
from rl_cluster.reward_models import RewardModel, RewardModelConfig, RewardModelTrainer
from rl_cluster.reward_models.export import export_classifier
from rl_cluster.run_folder.lock import LOCK
from rl_cluster.trainers.ppo.config import PPOConfig
from rl_cluster.trainers.ppo.trainer import PPOTrainer
from rl_cluster.trainers.rloo.config import RLOOConfig
from rl_cluster.trainers.rloo.trainer import RLOOTrainer
from tests.reward_models.reward_cases import TOKENIZER, make_base
from tests.run_folder.test_run_lock import HOLD, hear, process, tell
from tests.trainers.tiny import tiny_model

PROMPTS = [f"{a}+{b}=" for a in "123" for b in "123"]
LOCAL: dict[str, Any] = {"backend": "local", "device": "cpu", "progress": "none"}


def reward(prompts: list[str], responses: list[str], metadata: Any = None) -> list[float]:
    return [float(len(text) % 3) for text in responses]


def length(texts: list[str]) -> list[float]:
    return [float(len(text) % 3) for text in texts]


def ppo(folder: Path, **options: Any) -> PPOTrainer:
    config = PPOConfig(
        **LOCAL,
        output_dir=str(folder),
        batch_size=4,
        mini_batch_size=4,
        ppo_epochs=1,
        max_new_tokens=2,
        save_every=0,
        settings={"cluster.cpus_per_worker": 1, **options},
    )
    policy, tokenizer = tiny_model()
    return PPOTrainer(config, model=policy, tokenizer=tokenizer, reward_fn=reward)


def rloo(folder: Path, **options: Any) -> RLOOTrainer:
    config = RLOOConfig(
        output_dir=str(folder),
        total_episodes=16,
        rloo_k=4,
        response_length=2,
        num_ppo_epochs=1,
        num_mini_batches=1,
        num_sample_generations=0,
        per_device_train_batch_size=16,
        report_to="none",
        settings={
            "cluster.cpus_per_worker": 1,
            "cluster.backend": "local",
            "log.progress": "none",
            **options,
        },
    )
    policy, tokenizer = tiny_model()
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    return RLOOTrainer(config, tokenizer, policy, None, length, rows)


def sft(folder: Path) -> Any:
    policy, tokenizer = tiny_model()
    config = rl_cluster.SFTConfig(
        output_dir=str(folder),
        max_length=16,
        max_prompt_length=8,
        num_epochs=1,
        eval_every=0,
        save_every=0,
        progress="none",
        report_to="none",
        backend="local",
        cpus_per_worker=1,
    )
    return rl_cluster.SFTTrainer(config, policy, tokenizer)


ANSWERS = [{"prompt": prompt, "completion": "1"} for prompt in PROMPTS]


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> a call that writes a folder at the path that it is given."""
    place = tmp_path_factory.mktemp("runs")
    first, second, third = ppo(place / "ppo"), rloo(place / "rloo"), sft(place / "sft")
    first.train(PROMPTS, num_iterations=1)
    second.train()
    third.train(ANSWERS)
    config = RewardModelConfig(pooling_strategy="last")
    judge = RewardModel(config, base_model=make_base("qwen2"))
    scorer = RewardModelTrainer(judge, TOKENIZER, config)
    pipeline = ForwardBackwardPipeline(tiny_model()[0])
    yield {
        "ppo checkpoint": first.save_checkpoint,
        "ppo model": first.save_model,
        "rloo model": second.save_model,
        "sft model": third.save_model,
        "reward model": scorer.save_model,
        "classifier": lambda path: export_classifier(judge, TOKENIZER, path),
        "pipeline": pipeline.save_state,
    }
    first.close()
    second.close()


NAMES = ["ppo checkpoint", "ppo model", "rloo model", "sft model", "reward model", "classifier", "pipeline"]


@pytest.fixture(params=NAMES)
def write(request: pytest.FixtureRequest, writers: Any) -> Callable[[Any], Any]:
    return writers[request.param]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_somebody_else_stays_as_it_is(write: Callable[[Any], Any], tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    (thesis / "chapters").mkdir(parents=True)
    for name in ("chapters/one.tex", "config.json", "config.yaml", "README.md", "loop.json"):
        (thesis / name).write_text("{}")
    before = content(tmp_path)
    with pytest.raises(BadInputError, match=r"thesis.*not of this project.*Give a new or empty folder"):
        write(str(thesis))
    assert content(tmp_path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis"]


def test_a_new_an_empty_and_an_own_folder_are_written(write: Callable[[Any], Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty", "new", "deep/er"):
        write(str(tmp_path / name))
        marker = json.loads((tmp_path / name / MARKER).read_text())
        assert marker["written_by"] == "rl-cluster"
        assert sorted([*marker["files"], MARKER]) == sorted(content(tmp_path / name))
    (tmp_path / "new" / "notes.txt").write_text("mine")
    write(str(tmp_path / "new"))
    assert (tmp_path / "new" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "path", [".", "..", "/", "", "  ", "../work", "link", "dangling", "file", "file/x", 7]
)
def test_what_is_no_folder_of_its_own_is_refused_with_a_remedy(
    write: Callable[[Any], Any], path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "work"
    (here / "real").mkdir(parents=True)
    (here / "file").write_text("mine")
    (here / "link").symlink_to(here / "real")
    (here / "dangling").symlink_to(here / "nowhere")
    monkeypatch.chdir(here)
    before = sorted(here.rglob("*"))
    given = str(here / path) if isinstance(path, str) and path[:1].isalpha() else path
    with pytest.raises(BadInputError, match=r"[Gg]ive|choose"):
        write(given)
    assert sorted(here.rglob("*")) == before
    assert (here / "file").read_text() == "mine"


def test_a_folder_that_lies_around_the_working_directory_is_refused(
    write: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(str(tmp_path / "ours"))
    inside = tmp_path / "ours" / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    with pytest.raises(BadInputError, match="is the folder you work in, or one above it"):
        write(str(tmp_path / "ours"))


@pytest.mark.parametrize("name", ["ppo model", "rloo model", "sft model"])
def test_a_saved_model_is_an_ordinary_folder_of_transformers(writers: Any, name: str, tmp_path: Path) -> None:
    writers[name](str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert torch.isfinite(loaded(**tokenizer("1+2=", return_tensors="pt")).logits).all()
    visible = {entry.name for entry in (tmp_path / "model").iterdir()} - {MARKER}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= visible


def test_a_folder_of_another_kind_is_not_replaced(writers: Any, tmp_path: Path) -> None:
    writers["ppo checkpoint"](str(tmp_path / "one"))
    with pytest.raises(BadInputError, match="is a checkpoint, not a model"):
        writers["ppo model"](str(tmp_path / "one"))
    with rloo(tmp_path / "run") as other:
        other.train()
    before = content(tmp_path / "run")
    for name in ("ppo checkpoint", "ppo model", "pipeline", "reward model"):
        with pytest.raises(BadInputError, match="is a run, not a"):
            writers[name](str(tmp_path / "run"))
    assert content(tmp_path / "run") == before


def test_a_checkpoint_without_a_marker_is_known_by_its_parts(writers: Any, tmp_path: Path) -> None:
    saved = tmp_path / "step"
    writers["ppo checkpoint"](str(saved))
    (saved / MARKER).unlink()
    (saved / "mine.txt").write_text("mine")
    writers["ppo checkpoint"](str(saved))
    assert (saved / MARKER).is_file() and (saved / "mine.txt").read_text() == "mine"
    (saved / MARKER).unlink()
    shutil.rmtree(saved / "learner")
    with pytest.raises(BadInputError, match="not replaced"):
        writers["ppo checkpoint"](str(saved))


@pytest.mark.parametrize("name", ["ppo model", "rloo model", "reward model", "pipeline"])
def test_other_folders_without_a_marker_are_known_by_what_only_we_write(
    writers: Any, name: str, tmp_path: Path
) -> None:
    writers[name](str(tmp_path / "ours"))
    (tmp_path / "ours" / MARKER).unlink()
    writers[name](str(tmp_path / "ours"))
    assert (tmp_path / "ours" / MARKER).is_file()


def test_the_runs_own_folder_gets_the_model_besides_its_own_files(tmp_path: Path) -> None:
    """As TRL's scripts end: trainer.save_model(args.output_dir)."""
    with rloo(tmp_path / "run") as trainer:
        trainer.train()
        metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
        trainer.save_model(str(tmp_path / "run"))
        trainer.save_model()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    fitted = sft(tmp_path / "fit")
    fitted.train(ANSWERS)
    fitted.save_model(str(tmp_path / "fit"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "fit")
    assert (tmp_path / "fit" / "config.yaml").is_file()


@pytest.mark.parametrize("front", ["ppo", "rloo", "sft"])
@pytest.mark.parametrize("place", ["start/thesis.tex", "start/policy/thesis.tex", "thesis.tex"])
def test_a_refused_start_of_a_front_leaves_the_users_files(front: str, place: str, tmp_path: Path) -> None:
    project = tmp_path / "proj"
    (project / place).parent.mkdir(parents=True)
    (project / place).write_text("years of work")
    before = sorted(project.rglob("*"))
    with pytest.raises(BadInputError, match="is not empty"):
        start(front, project)
    assert sorted(project.rglob("*")) == before
    assert (project / place).read_text() == "years of work"


def start(front: str, folder: Path, **options: Any) -> None:
    if front == "ppo":
        with ppo(folder, **options) as trainer:
            trainer.train(PROMPTS, num_iterations=1)
    elif front == "rloo":
        with rloo(folder, **options) as trainer:
            trainer.train()
    else:
        sft(folder).train(options.get("rows", ANSWERS))


@pytest.mark.parametrize(
    ("front", "options"),
    [
        ("ppo", {"model.lora": "{targets: [nothing_so_called]}"}),
        ("rloo", {"model.lora": "{targets: [nothing_so_called]}"}),
        ("sft", {"rows": [{"prompt": "1", "completion": "é"}]}),
    ],
)
def test_a_failed_start_of_a_front_takes_back_what_it_made_and_the_corrected_one_uses_the_folder(
    front: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(BadInputError):
        start(front, tmp_path / "deep" / "run", **options)
    assert list(tmp_path.iterdir()) == []
    start(front, tmp_path / "deep" / "run")
    assert (tmp_path / "deep" / "run" / "metrics.jsonl").is_file()
    assert not (tmp_path / "deep" / "run" / LOCK).exists()


@pytest.mark.parametrize("front", ["ppo", "rloo", "sft"])
def test_a_folder_in_use_is_left_to_its_process(front: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    child = process(HOLD, str(folder))
    assert hear(child) == "held"
    with pytest.raises(BadInputError, match=f"in use by process {child.pid}"):
        start(front, folder)
    assert [entry.name for entry in folder.iterdir()] == [LOCK]
    tell(child)
    child.wait(timeout=60)


def test_a_trainer_that_is_open_keeps_others_of_its_process_away(tmp_path: Path) -> None:
    with rloo(tmp_path / "run", **{"checkpoint.every": 1}) as first:
        first.train()
        with pytest.raises(BadInputError, match=r"this very process.*close.. the trainer"):
            rloo(tmp_path / "run").train(resume_from_checkpoint=True)
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_moved_run_of_a_front_goes_on(tmp_path: Path) -> None:
    with rloo(tmp_path / "run", **{"checkpoint.every": 1}) as first:
        first.train()
    os.rename(tmp_path / "run", tmp_path / "moved")
    with rloo(tmp_path / "moved", **{"checkpoint.every": 1, "run.steps": 2}) as second:
        assert second.train(resume_from_checkpoint=True).global_step == 2
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_whose_replacement_died_between_the_renames_is_found_again(
    writers: Any, tmp_path: Path
) -> None:
    from rl_cluster.files.atomic import set_aside
    from rl_cluster.trainers.session import find_checkpoint

    place = tmp_path / "mine"
    writers["ppo checkpoint"](str(place))
    code = "import sys; from pathlib import Path; from rl_cluster.files.atomic import set_aside"
    dead = process(f"{code}; set_aside(Path(sys.argv[1]))", str(place))
    assert dead.wait(timeout=60) == 0
    assert not place.exists()
    assert find_checkpoint(place, "load_checkpoint") == place
    aside = set_aside(place)
    with pytest.raises(BadInputError, match="there is no checkpoint"):
        find_checkpoint(place, "load_checkpoint")  # of this process, which lives and may be about to rename
    assert aside.is_dir()
