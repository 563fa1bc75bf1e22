"""The right answers of a run's data in; BadInputError, before a run starts, for what nothing could equal."""

from __future__ import annotations

from collections.abc import Sequence

from rl_cluster.config.reward import ExactMatchScorer, MathScorer, ScorerConfig
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.functions import last_number
from rl_cluster.rewards.mathematics import OF_THIS_PROCESS, Unreadable
from rl_cluster.trajectory import Prompt


def check_references(configs: Sequence[ScorerConfig], prompts: Sequence[Prompt]) -> None:
    """Each answer against itself. A row whose answer cannot be read would be worth 0 for ever.

    prompts: all of training and evaluation, with the columns that the scorers need (check_metadata).
    """
    for config in configs:
        if isinstance(config, MathScorer) and config.unreadable == "refuse":
            _refuse(config, config.answer_key, prompts, _unreadable(config, prompts), MATH_REMEDY)
        elif isinstance(config, ExactMatchScorer) and config.extract == "last_number":
            answers = {str(prompt.metadata[config.answer_key]) for prompt in prompts}
            bad = {answer: "contains no number" for answer in answers if last_number(answer) is None}
            _refuse(config, config.answer_key, prompts, bad, "Correct the data, or set extract to all.")


MATH_REMEDY = (
    "Correct the data, set unreadable=exact_text in this scorer to compare such answers as text, or use "
    "kind: exact_match."
)


def _unreadable(config: MathScorer, prompts: Sequence[Prompt]) -> dict[str, str]:
    answers = [str(prompt.metadata[config.answer_key]) for prompt in prompts]
    return {bad.answer: bad.why for bad in OF_THIS_PROCESS.unreadable(answers)}


def _refuse(
    config: ScorerConfig, key: str, prompts: Sequence[Prompt], bad: dict[str, str], remedy: str
) -> None:
    rows = [prompt for prompt in prompts if str(prompt.metadata[key]) in bad]
    if rows:
        answer = str(rows[0].metadata[key])
        raise BadInputError(
            f"rewards.scorers ({config.kind}): {rows[0].prompt_id} has {key} = {answer!r:.80}, which "
            f"{bad[answer]} ({len(rows)} of {len(prompts)} rows are like this). {remedy}"
        )


def first_unreadable(answers: Sequence[str]) -> Unreadable | None:
    """Of an environment's problems."""
    found = OF_THIS_PROCESS.unreadable(answers)
    return found[0] if found else None
