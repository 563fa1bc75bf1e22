from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_cluster.config.data import AdditionSource, DataConfig, FileSource
from rl_cluster.data.load import load_prompts
from rl_cluster.errors import BadInputError


def config(path: Path, eval_path: Path | None = None, **options: Any) -> DataConfig:
    source = FileSource(source="jsonl", path=str(path), eval_path=str(eval_path) if eval_path else None)
    return DataConfig(train=source, **{"held_out": 0, **options})


def write(path: Path, *prompts: Any) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in prompts))
    return path


def ten_rows(path: Path) -> Path:
    return write(path, *[f"{i}+{i}=" for i in range(10)])


def test_the_last_rows_of_the_file_are_held_out(tmp_path: Path, tokenizer: Any) -> None:
    sets = load_prompts(config(ten_rows(tmp_path / "a.jsonl"), held_out=3), tokenizer)
    assert [prompt.text for prompt in sets.train] == [f"{i}+{i}=" for i in range(7)]
    assert [prompt.text for prompt in sets.held_out] == ["7+7=", "8+8=", "9+9="]
    assert sets.train[2].tokens.tolist() == tokenizer("2+2=")["input_ids"]
    assert sets.train[2].metadata == {"answer": "x"}
    assert sets.train[2].prompt_id.endswith("a.jsonl:3")


def test_evaluation_rows_of_their_own_leave_all_rows_to_training(tmp_path: Path, tokenizer: Any) -> None:
    held_out = write(tmp_path / "b.jsonl", "1+2=", "3+4=")
    sets = load_prompts(config(ten_rows(tmp_path / "a.jsonl"), held_out, held_out=5), tokenizer)
    assert len(sets.train) == 10
    assert [prompt.text for prompt in sets.held_out] == ["1+2=", "3+4="]


def test_bad_rows_are_refused_with_file_line_and_remedy(tmp_path: Path, chat_tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", "1+1=", "", "1" * 40, 5, "Ω", None, [], "2+2=")
    with pytest.raises(BadInputError) as caught:
        load_prompts(config(path, max_prompt_tokens=39), chat_tokenizer)
    lines = str(caught.value).splitlines()
    assert lines[0] == "data.train: 6 of 8 rows cannot be used:"
    assert lines[1].endswith("a.jsonl:2: the prompt is empty")
    assert lines[2].endswith("a.jsonl:3: 40 tokens, more than data.max_prompt_tokens=39")
    assert len(lines) == 8
    assert lines[6] == "  … and 1 more"
    assert "data.on_bad_row=skip" in lines[7]


def test_bad_rows_are_skipped_and_counted_when_so_configured(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", "1+1=", "", "1" * 40, "2+2=", "3+3=")
    path.write_text(path.read_text() + "{broken\n")
    sets = load_prompts(config(path, max_prompt_tokens=39, on_bad_row="skip", held_out=1), tokenizer)
    assert [prompt.text for prompt in sets.train] == ["1+1=", "2+2="]
    assert [prompt.text for prompt in sets.held_out] == ["3+3="]
    assert [row.place.rpartition(":")[2] for row in sets.skipped] == ["6", "2", "3"]


def test_a_prompt_of_exactly_the_limit_is_kept(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", "1" * 39)
    assert len(load_prompts(config(path, max_prompt_tokens=39), tokenizer).train) == 1


@pytest.mark.parametrize("on_bad_row", ["refuse", "skip"])
def test_only_bad_rows_are_refused_even_when_skipping(
    tmp_path: Path, tokenizer: Any, on_bad_row: str
) -> None:
    path = write(tmp_path / "a.jsonl", "", "")
    with pytest.raises(BadInputError, match="none of the 2 rows can be used"):
        load_prompts(config(path, on_bad_row=on_bad_row), tokenizer)
    good = ten_rows(tmp_path / "b.jsonl")
    with pytest.raises(BadInputError, match=r"data\.train \(held out\): none of the 2 rows"):
        load_prompts(config(good, path, on_bad_row=on_bad_row), tokenizer)


@pytest.mark.parametrize("held_out", [10, 11])
def test_holding_out_every_row_is_refused(tmp_path: Path, tokenizer: Any, held_out: int) -> None:
    with pytest.raises(BadInputError, match=rf"data\.held_out={held_out}: there are only 10 usable rows"):
        load_prompts(config(ten_rows(tmp_path / "a.jsonl"), held_out=held_out), tokenizer)


def test_chat_rows_need_a_template_wherever_they_are(
    tmp_path: Path, tokenizer: Any, chat_tokenizer: Any
) -> None:
    path = write(tmp_path / "a.jsonl", "1+1=", [{"role": "user", "content": "2+2"}])
    with pytest.raises(BadInputError, match="no chat template"):
        load_prompts(config(path), tokenizer)
    sets = load_prompts(config(path), chat_tokenizer)
    assert [prompt.text for prompt in sets.train] == ["1+1=", "user: 2+2 assistant: "]


def test_generated_sums_come_tokenised_with_their_answers(tokenizer: Any) -> None:
    source = AdditionSource(source="addition", num_digits=2)
    sets = load_prompts(DataConfig(train=source, held_out=50), tokenizer)
    assert len(sets.held_out) == 50
    assert 8100 - 100 <= len(sets.train) <= 8100 - 50
    for prompt in sets.train[:20]:
        a, b = prompt.text.rstrip("=").split("+")
        assert int(prompt.metadata["answer"]) == int(a) + int(b)
        assert tokenizer.decode(prompt.tokens) == prompt.text
