"""A tokenizer in, an environment of mathematical problems at three levels out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from rl_cluster.environments.ready.math_problems import make_math_problems
from rl_cluster.environments.ready.multi_objective import MultiObjectiveRewardEnv
from rl_cluster.environments.ready.text_generation import LEVELS
from rl_cluster.errors import BadInputError
from rl_cluster.rewards.functions import math_match
from rl_cluster.rewards.references import first_unreadable

INSTRUCTION = "Give the final answer on the last line, as: Answer: <answer>"

_ANSWER_LINE = re.compile(r"^[ \t]*Answer:[ \t]*(\S.*)$", re.MULTILINE)


def create_math_problem_env(
    tokenizer: Any,
    *,
    problems: Mapping[str, str] | None = None,
    difficulty: str = "easy",
    num_problems: int = 200,
    seed: int = 0,
    **settings: Any,
) -> MultiObjectiveRewardEnv:
    """Reward: 1.0 for the right answer + 0.1 for giving it in the form that was asked for.

    Components: correctness, 1 where math-verify finds the answer equivalent to the right one, else 0;
    formatting, 1 where the response has exactly one line `Answer: …`, else 0.
    problems: {prompt: right answer} of your own. Otherwise num_problems for each level are generated from the
    seed, and env.set_difficulty("easy" | "medium" | "hard") changes the level. settings: max_length,
    stop_sequences, temperature and reward_weights of MultiObjectiveRewardEnv.
    """
    if problems is None:
        levels = {level: _prompts(level, num_problems, seed) for level in LEVELS}
        if difficulty not in levels:
            raise BadInputError(f"difficulty={difficulty!r}: must be one of {', '.join(LEVELS)}.")
        answers = {prompt: answer for listed in levels.values() for prompt, answer in listed.items()}
        settings["prompt_levels"] = {level: list(listed) for level, listed in levels.items()}
        prompts = list(levels[difficulty])
    else:
        answers = dict(problems)
        prompts = list(answers)
        _check_answers(answers)
    return MultiObjectiveRewardEnv(
        tokenizer=tokenizer,
        prompts=prompts,
        reward_components={"correctness": partial(_correctness, answers), "formatting": answer_is_marked},
        **{"reward_weights": {"correctness": 1.0, "formatting": 0.1}, **settings},
    )


def final_answer(text: str) -> str:
    """What follows the last `Answer:` at the beginning of a line; without one, the whole text."""
    found = _ANSWER_LINE.findall(text)
    return found[-1].strip() if found else text


def answer_is_marked(prompt: str, generated: str, full_text: str) -> float:
    """1.0 where exactly one line says `Answer: something`, else 0.0."""
    return float(len(_ANSWER_LINE.findall(generated)) == 1)


def _correctness(answers: Mapping[str, str], prompt: str, generated: str, full_text: str) -> float:
    if prompt not in answers:
        raise BadInputError(f"math environment: no right answer is known for the prompt {prompt!r:.80}.")
    return math_match([prompt], [final_answer(generated)], [{"answer": answers[prompt]}])[0]


def _prompts(level: str, num_problems: int, seed: int) -> dict[str, str]:
    made = make_math_problems(level, num_problems, seed)
    return {f"{problem.question}\n{INSTRUCTION}\n": problem.answer for problem in made}


def _check_answers(answers: Mapping[str, Any]) -> None:
    """Each right answer is read before the first episode: what cannot be read would be worth 0 for ever."""
    for prompt, answer in answers.items():
        if answer is None or isinstance(answer, bool):
            raise BadInputError(f"problems[{prompt!r:.60}]={answer!r}: give the right answer as text.")
    bad = first_unreadable([str(answer) for answer in answers.values()])
    if bad is not None:
        prompt = next(prompt for prompt, answer in answers.items() if str(answer) == bad.answer)
        raise BadInputError(
            f"problems[{prompt!r:.60}]={bad.answer!r:.60} is not a mathematical expression: it {bad.why}. "
            "Correct the answer."
        )
