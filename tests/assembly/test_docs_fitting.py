"""The example of docs/fitting.md runs and prints what it says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "fitting.md"


def test_the_example_of_the_page_fits_and_improves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    exec(compile(block, "fitting.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == "0.6931 before\nTrue\n"
    assert (tmp_path / "runs" / "pairs" / "model" / "config.json").is_file()
