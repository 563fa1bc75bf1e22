"""A model, data files and the command line in this process, for the tests of `llm`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SUMS = [(f"{a}+{b}=", str(a + b), str(a + b + 1)) for a in range(3) for b in range(3)]


@pytest.fixture(scope="session")
def llm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny/ (a char-level model with a chat template), tiny-reward/, and a data file per format."""
    from rl_cluster.config.run import ScratchModel
    from rl_cluster.modeling.scratch import save_scratch_model

    folder = tmp_path_factory.mktemp("llm")
    scratch = ScratchModel(hidden_size=64, num_layers=1, num_heads=2, intermediate_size=32, max_positions=64)
    save_scratch_model(scratch, folder / "tiny", 0, TEMPLATE)
    rows: dict[str, list[dict[str, Any]]] = {
        "pairs": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in SUMS],
        "renamed": [{"question": p, "good": c, "bad": r} for p, c, r in SUMS],
        "labels": [
            {"prompt": p, "text": text, "label": label}
            for p, c, r in SUMS
            for text, label in ((c, 1), (r, 0))
        ],
        "prompts": [{"prompt": p, "answer": c} for p, c, _ in SUMS],
        "sft": [{"prompt": p, "completion": c} for p, c, _ in SUMS],
        "texts": [{"text": p + c} for p, c, _ in SUMS],
        "chats": [
            {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]}
            for p, c, _ in SUMS
        ],
    }
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = [f"{r['prompt']},{r['text']},{'true' if r['label'] else 'false'}" for r in rows["labels"]]
    (folder / "kto.csv").write_text("\n".join(["prompt,completion,label", *lines]) + "\n")
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text((folder / "prompts.jsonl").read_text())
    return folder


@pytest.fixture
def llm(
    llm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """llm("--trainer dpo …") -> exit code, what stdout and stderr say; runs in the folder with the data."""
    from rl_cluster.cli.app import app
    from rl_cluster.cli.failures import run_guarded

    monkeypatch.chdir(llm_folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def call(words: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rl-cluster", "llm", *words.split(), *more])
        with pytest.raises(SystemExit) as ended:
            run_guarded(app)
        said = capsys.readouterr()
        return int(str(ended.value.code or 0)), said.out, said.err

    return call
