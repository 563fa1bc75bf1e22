"""Every Python block of every page of docs/ runs, page by page; every `rl-cluster llm` line is planned."""

from __future__ import annotations

import gc
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.seed_documents.stage import save_data, training

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"^```(?:bash|shell|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LANGUAGE_MODELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2", "google/gemma-2-2b": "gemma-2"}
"""Named on the pages -> the tiny model of the same architecture that takes its place here."""

ELSEWHERE = {
    "backends.md": "tests/assembly/test_docs_backends.py",
    "fitting.md": "tests/assembly/test_docs_fitting.py",
    "ppo.md": "tests/trainers/test_ppo_docs.py",
    "rloo.md": "tests/trainers/test_docs_rloo_grpo.py",
    "grpo.md": "tests/trainers/test_docs_rloo_grpo.py",
}
"""Pages whose own test runs their blocks."""

PRINTED = {
    "losses.md": ["tokens 0.5 ", "1.0\n"],
    "environments.md": [
        "Steps: 1\n",
        "1.0 0.5 1.05\n",
        "-1.0 {'prompt': 'What is AI?', 'chosen': 'idk', 'rejected': 'Software that learns.'}",
        "(1.1, {'correctness': 1.0, 'formatting': 1.0})",
        "(1.2, {'syntax': 1.0, 'style': 1.0, 'tests': 1.0})",
        "[1.0]\n",
        "[1.0, 0.0]\n",
    ],
    "judge.md": ["2 wins, 1 ties, 0 losses", "3\n", "+0."],
    "reward_models.md": ["torch.Size([1, 1])", "torch.Size([1, 2]) torch.Size([1, 1])"],
}
"""What a page says its blocks print."""


def blocks_of(page: str) -> list[str]:
    return BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))


PAGES = sorted(page.name for page in (ROOT / "docs").glob("*.md"))
HERE = [page for page in PAGES if page not in ELSEWHERE and blocks_of(page)]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    torch.manual_seed(0)
    return tmp_path


@pytest.mark.parametrize("page", HERE)
def test_the_blocks_of_a_page_run_in_order_and_print_what_they_say(
    page: str, models: Path, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "page", **training()}
    names["batches"] = [names["batch"], names["batch"]]
    for number, block in enumerate(blocks_of(page), start=1):
        for model, stand_in in LANGUAGE_MODELS.items():
            block = block.replace(model, str(models / stand_in))
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    del names
    gc.collect()
    printed = capsys.readouterr().out
    for expected in PRINTED.get(page, []):
        assert expected in printed


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_page_with_a_test_of_its_own_is_read_by_it(page: str) -> None:
    assert page in (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")
    assert blocks_of(page)


def test_the_command_lines_of_the_pages_are_planned(models: Path, desk: Path) -> None:
    from typer.testing import CliRunner

    from rl_cluster.cli.app import app

    stand_ins = {model: str(models / stand_in) for model, stand_in in LANGUAGE_MODELS.items()}
    stand_ins["./my-reward-model"] = str(models / "scorer")
    planned = 0
    for page in PAGES:
        for block in SHELL.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:2] != ["rl-cluster", "llm"] or "--resume" in words or "--help" in words:
                    continue
                words = [stand_ins.get(word, word) for word in words]
                done = CliRunner().invoke(app, [*words[1:], "--device", "cpu", "--dry-run"])
                assert done.exit_code == 0, (page, line, done.exception)
                planned += 1
    assert planned >= 8
