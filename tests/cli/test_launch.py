"""The command line as a user meets it: exit codes, messages, and that --dry-run starts nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = """
run: {steps: 3}
model: {scratch: {}}
data: {train: {source: addition}}
rewards: {scorers: [{kind: exact_match}]}
"""


def launch(*words, cwd=ROOT, **environment):
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *words],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_dry_run_prints_everything_and_leaves_nothing_behind(recipe, tmp_path):
    done = launch("train", str(recipe), "batch.prompts_per_step=5", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in (
        "prompts_per_step: 5",
        "sequences per step                 40",
        "learner-0",
        "rollout-0",
        "GiB of RAM = process",
        "KV cache of an engine",
    ):
        assert part in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recipe.yaml"]


def test_dry_run_imports_none_of_the_heavy_libraries(recipe):
    program = (
        "import sys; sys.argv = ['launch.py', 'train', sys.argv[1], '--dry-run'];"
        "from rl_cluster.cli import main\n"
        "try: main()\n"
        "except SystemExit as exit: assert exit.code in (0, None), exit.code\n"
        "print('heavy:', sorted({'torch', 'vllm', 'ray', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(recipe)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert "heavy: []" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "{recipe}", "run.stepz=3"], "Did you mean run.steps?"),
        (["train", "{recipe}", "rollout.num_workers=4096"], "cores"),
        (["train", "nowhere.yaml"], "there is no such file"),
        (["train"], "give a recipe"),
        (["train", "--resume", "/no/run"], "not a run folder"),
        (["train", "{recipe}", "run.dir={folder}"], "is not empty"),
        (["train", "{recipe}", "run.dir={recipe}"], "is a file"),
        (["train", "{recipe}", "run.dir=/proc/1/run", "--dry-run"], "run.dir"),
        (["eval", "{recipe}", "eval.num_prompts=201"], "eval.num_prompts = 201"),
        (["eval", "{folder}"], "not a run folder"),
        (["plot", "/no/run", "--out", "x.png"], "not a run folder"),
        (["train", "{recipe}", "--no-such-option"], "No such option"),
    ],
)
def test_bad_input_exits_with_2_and_no_traceback(recipe, words, part):
    places = {"recipe": recipe, "folder": recipe.parent}
    done = launch(*(word.format(**places) for word in words))
    assert done.returncode == 2, done.stdout + done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_the_commands():
    done = launch("--help")
    assert done.returncode == 0
    for command in ("train", "eval", "plot"):
        assert command in done.stdout


def test_importing_the_package_is_light():
    program = (
        "import sys, rl_cluster\n"
        "print(sorted({'torch', 'vllm', 'ray', 'deepspeed', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
