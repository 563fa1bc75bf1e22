"""The example of docs/backends.md runs and prints what a run leaves."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"


def test_the_example_of_the_page_trains_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    exec(compile(block, "backends.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.endswith("'eval/mean_length', 'eval/pass@1', 'eval/score_mean']\nTrue\n")
