"""Rows of fixed data become token sequences: what trains, what is cut, what is refused and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_cluster.config.fit import DPO, KTO, SFT, FitDataConfig, RewardObjective
from rl_cluster.data.pairs import FitRows, load_fit_data
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_tokenizer

GIVEN = FitDataConfig(source="given", max_length=12, max_prompt_length=6)
EOS = 1
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def chatty() -> Any:
    return build_tokenizer("0123456789+= aus\n", 64, TEMPLATE)


def texts(tokenizer: Any, rows: FitRows) -> list[tuple[str, str]]:
    """(what does not train, what trains) of each row."""
    batch, result = rows.batch, []
    for row in range(batch.num_rows):
        part = slice(batch.offsets[row], batch.offsets[row + 1])
        tokens, mask = batch.tokens[part], batch.action_mask[part]
        result.append((tokenizer.decode(tokens[~mask]), tokenizer.decode(tokens[mask])))
    return result


def test_pairs_lie_side_by_side_and_only_responses_with_their_end_train(char_tokenizer: Any) -> None:
    data = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "33"},
        {"prompt": "2=", "chosen": "2", "rejected": "0"},
    ]
    rows = load_fit_data(GIVEN, DPO(), char_tokenizer, 12, data).train
    assert texts(char_tokenizer, rows) == [
        ("1+1=", "2<eos>"),
        ("1+1=", "33<eos>"),
        ("2=", "2<eos>"),
        ("2=", "0<eos>"),
    ]
    assert rows.batch.units.tolist() == [0, 0, 1, 1]
    assert rows.num_examples == 2
    assert texts(char_tokenizer, rows.select([1])) == texts(char_tokenizer, rows)[2:]


def test_long_prompts_keep_their_end_and_long_responses_their_start(char_tokenizer: Any) -> None:
    data = [{"prompt": "123456789=", "chosen": "123456", "rejected": "7654321"}]
    rows = load_fit_data(GIVEN, DPO(), char_tokenizer, 12, data).train
    # Six tokens are left for the response: 123456 loses its end token, 7654321 its last digit and the end.
    assert texts(char_tokenizer, rows) == [("56789=", "123456"), ("56789=", "765432")]
    with pytest.raises(BadInputError, match="row 1: chosen and rejected are the same"):
        load_fit_data(GIVEN, DPO(), char_tokenizer, 12, [{**data[0], "rejected": "1234567"}])


def test_kto_rows_carry_labels_and_mismatched_completions(char_tokenizer: Any) -> None:
    data = [{"prompt": f"{i}=", "completion": str(i), "label": i % 2 == 0} for i in range(4)]
    rows = load_fit_data(GIVEN, KTO(), char_tokenizer, 12, data).train
    assert rows.batch.labels is not None and rows.mismatched is not None
    assert rows.batch.labels[rows.batch.offsets[1:] - 1].tolist() == [1, -1, 1, -1]
    mixed = texts(char_tokenizer, FitRows(rows.mismatched, 1))
    assert mixed == [("0=", "2<eos>"), ("1=", "3<eos>"), ("2=", "0<eos>"), ("3=", "1<eos>")]
    chosen = rows.select([3, 0])
    assert texts(char_tokenizer, FitRows(chosen.mismatched, 1)) == [mixed[3], mixed[0]]  # type: ignore[arg-type]


def test_reward_rows_end_in_one_action_after_the_text(char_tokenizer: Any) -> None:
    data = [{"chosen": "1+1=2", "rejected": "1", "gap": 0.5}]
    settings = GIVEN.model_copy(update={"margin_column": "gap"})
    rows = load_fit_data(settings, RewardObjective(), char_tokenizer, 12, data).train
    assert texts(char_tokenizer, rows) == [("1+1=2<eos>", "<eos>"), ("1<eos>", "<eos>")]
    assert rows.batch.action_counts.tolist() == [1, 1]
    assert rows.batch.margins is not None
    assert rows.batch.margins.tolist() == [0] * 6 + [0.5] + [0] * 3


def test_where_the_end_token_pads_the_score_is_read_before_it() -> None:
    tokenizer = build_tokenizer("0123456789=", 64)
    tokenizer.pad_token = tokenizer.eos_token
    rows = load_fit_data(GIVEN, RewardObjective(), tokenizer, 12, [{"chosen": "12", "rejected": "3"}]).train
    assert texts(tokenizer, rows) == [("12", "<eos>"), ("3", "<eos>")]


def test_supervised_rows_train_completions_or_everything_but_the_first_token(char_tokenizer: Any) -> None:
    data = [{"prompt": "1+1=", "completion": "2"}]
    rows = load_fit_data(GIVEN, SFT(), char_tokenizer, 12, data).train
    assert texts(char_tokenizer, rows) == [("1+1=", "2<eos>")]
    rows = load_fit_data(GIVEN, SFT(train_on="all"), char_tokenizer, 12, data).train
    assert texts(char_tokenizer, rows) == [("1", "+1=2<eos>")]
    rows = load_fit_data(GIVEN, SFT(rows="text"), char_tokenizer, 12, [{"text": "1+1=2"}]).train
    assert texts(char_tokenizer, rows) == [("1", "+1=2<eos>")]


def test_chats_go_through_the_template_and_end_once(chatty: Any) -> None:
    user, right, wrong = (
        {"role": role, "content": text}
        for role, text in (("user", "1+1="), ("assistant", "2"), ("assistant", "3"))
    )
    data = GIVEN.model_copy(update={"max_length": 64, "max_prompt_length": 32})
    rows = load_fit_data(data, SFT(rows="messages"), chatty, 64, [{"messages": [user, right]}]).train
    assert texts(chatty, rows) == [("u1+1=\na", "2<eos>")]
    for record in (
        {"chosen": [user, right], "rejected": [user, wrong]},
        {"prompt": [user], "chosen": "2", "rejected": [wrong]},
    ):
        rows = load_fit_data(data, DPO(), chatty, 64, [record]).train
        assert texts(chatty, rows) == [("u1+1=\na", "2<eos>"), ("u1+1=\na", "3<eos>")]


GOOD = {"prompt": "1=", "chosen": "1", "rejected": "2"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rejected": None}, "no value in the column 'rejected'"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"chosen": ""}, "the chosen is empty"),
        ({"chosen": 3}, "the chosen is int 3, not a string"),
        ({"rejected": "1"}, "chosen and rejected are the same"),
        ({"chosen": "é"}, "does not know"),
    ],
)
def test_bad_rows_are_named_by_file_and_line_and_may_be_skipped(
    char_tokenizer: Any, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (GOOD, {**GOOD, **change}, GOOD)))
    data = FitDataConfig(path=str(path))
    with pytest.raises(BadInputError, match=rf"pairs\.jsonl:2: .*{reason}"):
        load_fit_data(data, DPO(), char_tokenizer, 64)
    kept = load_fit_data(data.model_copy(update={"on_bad_row": "skip"}), DPO(), char_tokenizer, 64)
    assert kept.train.num_examples == 2
    assert len(kept.skipped) == 1


@pytest.mark.parametrize("label", [2, "yes", -1])
def test_labels_must_be_true_or_false(char_tokenizer: Any, label: Any) -> None:
    rows = [
        {"prompt": "1=", "completion": "1", "label": True},
        {"prompt": "1=", "completion": "1", "label": label},
    ]
    with pytest.raises(BadInputError, match="row 2: the label is"):
        load_fit_data(GIVEN, KTO(), char_tokenizer, 12, rows)


def test_the_last_rows_are_held_out_unless_too_few_are_left(char_tokenizer: Any) -> None:
    rows = [{**GOOD, "prompt": f"{i}="} for i in range(5)]
    data = GIVEN.model_copy(update={"held_out": 2})
    sets = load_fit_data(data, DPO(), char_tokenizer, 12, rows)
    assert sets.evaluation is not None
    assert [t[0] for t in texts(char_tokenizer, sets.evaluation)][::2] == ["3=", "4="]
    assert sets.train.num_examples == 3
    with pytest.raises(BadInputError, match="held_out=5"):
        load_fit_data(data.model_copy(update={"held_out": 5}), DPO(), char_tokenizer, 12, rows)
    apart = load_fit_data(GIVEN, DPO(), char_tokenizer, 12, rows[:4], rows[4:])
    assert apart.evaluation is not None and apart.evaluation.num_examples == 1
    assert apart.train.fingerprint != sets.train.fingerprint
    assert np.array_equal(apart.train.select([0, 1, 2]).batch.tokens, sets.train.batch.tokens)
