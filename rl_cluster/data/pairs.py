"""Files or rows of fixed data in, FitRows out: every sequence tokenised, pairs side by side, no padding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_cluster.batch import TokenBatch
from rl_cluster.config.data import FileSource
from rl_cluster.config.fit import KTO, FitDataConfig, Objective
from rl_cluster.data.encode import UnusablePromptError
from rl_cluster.data.fit_encode import Encoder, Example, Tokens, anchor_column
from rl_cluster.data.readers import read_file
from rl_cluster.data.rows import BadRow, RawRows, Row, refuse_bad_rows
from rl_cluster.errors import BadInputError


@dataclass(frozen=True)
class FitRows:
    """E examples as the rows of one TokenBatch: example i is row i, or of pairs the rows 2i and 2i + 1.

    mismatched: KTO's E rows of each prompt with another row's completion, for the KL baseline.
    fingerprint: tells whether two runs have the same data.
    """

    batch: TokenBatch
    rows_per_example: int
    mismatched: TokenBatch | None = None

    @property
    def num_examples(self) -> int:
        return self.batch.num_rows // self.rows_per_example

    def select(self, examples: Sequence[int]) -> FitRows:
        """These examples, in this order."""
        size = self.rows_per_example
        rows = [int(example) * size + side for example in examples for side in range(size)]
        mismatched = None if self.mismatched is None else self.mismatched.select(list(examples))
        return FitRows(self.batch.select(rows), size, mismatched)

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        batch = self.batch
        numbers = batch.margins if batch.labels is None else batch.labels
        for column in (batch.tokens, batch.lengths, batch.action_mask, numbers):
            digest.update(b"-" if column is None else np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class FitSets:
    """evaluation: None where nothing is held out. skipped: bad rows that were left out."""

    train: FitRows
    evaluation: FitRows | None
    skipped: tuple[BadRow, ...] = ()


GivenRows = Sequence[Mapping[str, Any]]


def load_fit_data(
    data: FitDataConfig,
    objective: Objective,
    tokenizer: Any,
    max_length: int,
    given: GivenRows | None = None,
    given_eval: GivenRows | None = None,
) -> FitSets:
    """Read, tokenise, split. given: the rows, where data.source is given.

    Raises BadInputError for a missing or empty file and, unless data.on_bad_row is skip, for bad rows, each
    with file and line.
    """
    encoder = Encoder(tokenizer, data, max_length)
    train_rows, eval_rows = _raw_rows(data, objective, given, given_eval)
    train, bad = _encode(encoder, objective, train_rows, anchor_column(data, objective))
    evaluation, eval_bad = _encode(encoder, objective, eval_rows, anchor_column(data, objective))
    refuse_bad_rows("data", bad, len(train) + len(bad), data.on_bad_row)
    refuse_bad_rows("data (held out)", eval_bad, len(evaluation) + len(eval_bad), data.on_bad_row)
    if not evaluation and data.held_out:
        if data.held_out >= len(train):
            raise BadInputError(
                f"data.held_out={data.held_out}: there are only {len(train)} usable rows, so none would be "
                "left to train on. Hold out fewer, or name a file of evaluation rows in data.eval_path."
            )
        train, evaluation = train[: -data.held_out], train[-data.held_out :]
    return FitSets(
        train=_fit_rows(train, objective, max_length, "data"),
        evaluation=_fit_rows(evaluation, objective, max_length, "data (held out)") if evaluation else None,
        skipped=(*bad, *eval_bad),
    )


def _raw_rows(
    data: FitDataConfig, objective: Objective, given: GivenRows | None, given_eval: GivenRows | None
) -> tuple[RawRows, RawRows]:
    if data.source == "given":
        if not given:
            raise BadInputError("data.source=given: no rows were handed over. Give at least one.")
        return _handed_over(given, "row"), _handed_over(given_eval or (), "evaluation row")
    if data.path is None:
        raise BadInputError(f"data.path: is required where data.source is {data.source}.")
    anchor = anchor_column(data, objective)
    source = FileSource(source=data.source, path=data.path, prompt_column=anchor)
    evaluation = RawRows(())
    if data.eval_path is not None:
        evaluation = read_file(source, data.eval_path, "data.eval_path")
    return read_file(source, data.path, "data.path"), evaluation


def _handed_over(records: GivenRows, name: str) -> RawRows:
    rows = [Row(f"{name} {number}", None, record) for number, record in enumerate(records, start=1)]
    return RawRows(tuple(rows))


def _encode(
    encoder: Encoder, objective: Objective, raw: RawRows, anchor: str
) -> tuple[list[Example], list[BadRow]]:
    examples, bad = [], list(raw.bad)
    for row in raw.rows:
        record = dict(row.metadata) if row.prompt is None else {**row.metadata, anchor: row.prompt}
        try:
            examples.append(encoder.example(objective, record, row.place))
        except UnusablePromptError as error:
            bad.append(BadRow(row.place, str(error)))
    return examples, bad


def _fit_rows(examples: Sequence[Example], objective: Objective, max_length: int, field: str) -> FitRows:
    batch = token_batch(examples)
    mismatched = None
    if isinstance(objective, KTO):
        if len(examples) < 2:
            raise BadInputError(f"{field}: KTO compares rows with each other; give at least two.")
        mismatched = token_batch(mismatch(examples, max_length))
    return FitRows(batch, len(examples[0].sequences), mismatched)


def mismatch(examples: Sequence[Example], max_length: int) -> list[Example]:
    """Each prompt with the completion of the row half the data away (neighbours often share a prompt)."""
    distance = len(examples) // 2
    mixed = []
    for index, example in enumerate(examples):
        own = example.sequences[0]
        other = examples[(index + distance) % len(examples)].sequences[0]
        tokens = np.concatenate([own.tokens[: own.num_prompt], other.tokens[other.num_prompt :]])
        mixed.append(Example(example.place, (Tokens(tokens[:max_length], own.num_prompt),)))
    return mixed


def token_batch(examples: Sequence[Example]) -> TokenBatch:
    """The sequences end to end; both sides of a pair are one unit. An example's number, the
    label of a single row or the margin of a pair, is at the last token of its first sequence."""
    sequences = [sequence for example in examples for sequence in example.sequences]
    unit = np.repeat(
        np.arange(len(examples), dtype=np.int32), [len(example.sequences) for example in examples]
    )
    masks = [np.arange(len(s.tokens)) >= s.num_prompt for s in sequences]
    pairs, numbers = len(examples[0].sequences) == 2, _numbers(examples)
    return TokenBatch(
        tokens=np.concatenate([s.tokens for s in sequences]),
        lengths=np.array([len(s.tokens) for s in sequences], dtype=np.int32),
        action_mask=np.concatenate(masks),
        units=unit,
        group_ids=unit.copy(),
        labels=None if pairs else numbers,
        margins=numbers if pairs else None,
    )


def _numbers(examples: Sequence[Example]) -> np.ndarray | None:
    if examples[0].number is None:
        return None
    columns = []
    for example in examples:
        for side, sequence in enumerate(example.sequences):
            column = np.zeros(len(sequence.tokens), dtype=np.float32)
            if side == 0:
                assert example.number is not None
                column[-1] = example.number
            columns.append(column)
    return np.concatenate(columns)
