"""The layers: import contracts hold, every module is in one, files stay small, imports stay light."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.durations import LONG, SLOW

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("rl_cluster", "actors", "learners", "tests", "bench")
    for path in (ROOT / folder).rglob("*.py")
)
HOMES = {
    "vllm": ("actors", "learners"),
    "deepspeed": ("learners",),
    "ray": ("actors", "learners", "rl_cluster/assembly", "rl_cluster/cli", "rl_cluster/ray_answers.py"),
}


@pytest.mark.parametrize("place", SLOW + LONG)
def test_the_tests_that_are_listed_by_duration_are_there(place):
    file, _, name = place.partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert not name or f"def {name}(" in text


def test_the_import_contracts_hold():
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_every_module_of_the_library_is_in_a_layer():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = " ".join(settings["contracts"][0]["layers"])
    modules = [p for p in (ROOT / "rl_cluster").iterdir() if p.name not in ("__init__.py", "__pycache__")]
    missing = [p.stem for p in modules if f"rl_cluster.{p.stem}" not in layers]
    assert missing == []


@pytest.mark.parametrize("package", HOMES)
def test_a_heavy_library_is_imported_only_where_it_belongs(package):
    strays = []
    for path in SOURCES:
        place = path.relative_to(ROOT).as_posix()
        if place.startswith(("tests/", "bench/", *HOMES[package])):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            strays += [f"{place}:{node.lineno}" for name in names if name.split(".")[0] == package]
    assert strays == []


def test_files_stay_small():
    sizes = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: size for name, size in sizes.items() if size > 400} == {}


def test_every_module_says_what_it_is_for():
    mute = [
        p.as_posix()
        for p in SOURCES
        if not p.is_relative_to(ROOT / "tests") and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert mute == []
