"""Every Python block of the pages on losses, environments and judges runs, with small models."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def small_models(tokenizer, monkeypatch):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda name: Qwen2ForCausalLM(config)
    )


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
        "[0.0, 1.0]\n",
        "Guess a digit: 3\nNo. Again: ",
        "[{'prompt': 'Guess a digit: ', 'prompt_idx': 0}]\n0 1\n",
    ],
    "judge.md": ["2 wins, 1 ties, 0 losses", "3\n", "+0."],
}


@pytest.mark.parametrize("page", PRINTED)
def test_the_blocks_of_a_page_run_in_order_and_print_what_they_say(
    page, small_models, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert len(blocks) >= 3
    names: dict = {"__name__": "page"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    for expected in PRINTED[page]:
        assert expected in printed
