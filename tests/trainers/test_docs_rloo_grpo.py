"""Every Python block of the pages on RLOO and GRPO runs, with a small model of the same architecture."""

import re
from pathlib import Path

import pytest

from tests.seed_documents.stage import save_models
from tests.seed_documents.substitutions import MODELS

DOCS = Path(__file__).parents[2] / "docs"
NAMED = "HuggingFaceTB/SmolLM2-135M-Instruct"
PRINTED = {"rloo.md": [r"-?\d+\.\d+", "2 0.05"], "grpo.md": [r"\d\.\d+", "1"]}


@pytest.mark.parametrize("page", PRINTED)
def test_the_blocks_of_the_page_run_and_print(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == len(PRINTED[page])
    for block, pattern in zip(blocks, PRINTED[page], strict=True):
        # Two threads on two busy cores would slow each other down.
        one_thread = 'settings={"cluster.cpus_per_worker": 1}, report_to='
        source = block.replace(NAMED, str(tmp_path / MODELS[NAMED])).replace("report_to=", one_thread)
        exec(compile(source, page, "exec"), {"__name__": "page"})
        assert re.fullmatch(pattern, capsys.readouterr().out.strip().splitlines()[-1])
