"""A reasoning-gym family by name in, training and held-out rows with the entry for its own scorer out."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from rl_cluster.config.data import ReasoningGymSource
from rl_cluster.data.rows import Row
from rl_cluster.errors import BadInputError

DATA_SEED = 20_000


def open_family(family: str, options: Mapping[str, Any], size: int) -> Any:
    """reasoning-gym's ProceduralDataset; BadInputError for an unknown family or options it does not take."""
    with warnings.catch_warnings():
        # One of reasoning-gym's dependencies compares with `is`, which Python warns of at import.
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise BadInputError(
                "data.train.source=reasoning_gym needs the package reasoning-gym: pip install reasoning-gym"
            ) from error
    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(sorted(DATASETS))}."
        raise BadInputError(f"data.train.family={family!r}: reasoning-gym has no such family. {hint}")
    try:
        return reasoning_gym.create_dataset(family, size=size, seed=DATA_SEED, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise BadInputError(f"data.train.options={dict(options)!r}: refused by {family}: {error}") from error


def make_gym_rows(source: ReasoningGymSource, held_out: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """(training rows, held-out rows). A training row whose question is also held out is left out.

    metadata: answer, and what the scorer needs: family, options, entry. The rows are the same in every
    run, whatever its seed.
    """
    data = open_family(source.family, source.options, source.size + held_out)
    rows = [_row(source, data[index], index) for index in range(source.size + held_out)]
    evaluated = rows[:held_out]
    questions = {row.metadata["entry"]["question"] for row in evaluated}
    trained = [row for row in rows[held_out:] if row.metadata["entry"]["question"] not in questions]
    if not trained:
        raise BadInputError(
            f"data.held_out={held_out}: {source.family} has so few different questions that none is left to "
            "train on. Hold out fewer, raise data.train.size, or choose options with more variety."
        )
    return tuple(trained), tuple(evaluated)


def _row(source: ReasoningGymSource, entry: Mapping[str, Any], index: int) -> Row:
    question = entry["question"]
    prompt = [{"role": "user", "content": question}] if source.chat else question
    metadata = {
        "answer": entry["answer"],
        "family": source.family,
        "options": dict(source.options),
        "entry": dict(entry),
    }
    return Row(f"{source.family}: entry {index}", prompt, metadata)
