"""A tokenizer in, an environment of programming problems at three levels out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rl_cluster.environments.ready.code_checks import check_problems
from rl_cluster.environments.ready.code_problems import PROBLEMS, CodeProblem
from rl_cluster.environments.ready.code_runner import CodeLimits, passed_tests
from rl_cluster.environments.ready.code_text import extract_code, find_ruff, parses, style_score
from rl_cluster.environments.ready.multi_objective import MultiObjectiveRewardEnv
from rl_cluster.errors import BadInputError

Component = Callable[[str, str, str], float]
WEIGHTS = {"syntax": 0.1, "style": 0.1, "tests": 1.0}


def create_code_generation_env(
    tokenizer: Any,
    *,
    problems: Sequence[CodeProblem] | None = None,
    difficulty: str = "easy",
    components: Sequence[str] = ("syntax", "style", "tests"),
    limits: CodeLimits | None = None,
    **settings: Any,
) -> MultiObjectiveRewardEnv:
    """Reward: 0.1 · syntax + 0.1 · style + 1.0 · tests, each between 0 and 1, of the code in a response.

    syntax: 1 where the code parses (Python's ast) and is not empty. style: 1 / (1 + findings of ruff).
    tests: the share of the problem's unit tests that pass, run in a subprocess with limits (code_runner:
    against accidents and cheats, not against attackers; a hardened sandbox comes later). components: which to
    use. problems: your own, whose tests are checked here (check_problems); otherwise there are built-in ones
    and env.set_difficulty("easy" | "medium" | "hard").
    settings: max_length, stop_sequences, temperature and reward_weights of MultiObjectiveRewardEnv.
    BadInputError if style is wanted and ruff is not installed.
    """
    unknown = [name for name in components if name not in WEIGHTS]
    if unknown or not components or isinstance(components, str):
        raise BadInputError(f"components={components!r}: choose from {', '.join(WEIGHTS)}.")
    if problems is None:
        if difficulty not in PROBLEMS:
            raise BadInputError(f"difficulty={difficulty!r}: must be one of {', '.join(PROBLEMS)}.")
        settings["prompt_levels"] = {level: [p.prompt for p in made] for level, made in PROBLEMS.items()}
        known = [problem for made in PROBLEMS.values() for problem in made]
        prompts = [problem.prompt for problem in PROBLEMS[difficulty]]
    else:
        known = list(problems)
        check_problems(known)
        prompts = [problem.prompt for problem in known]
    makers: dict[str, Callable[[], Component]] = {
        "syntax": lambda: _syntax,
        "style": lambda: partial(_style, find_ruff()),
        "tests": lambda: partial(_tests, {p.prompt: p for p in known}, limits or CodeLimits()),
    }
    return MultiObjectiveRewardEnv(
        tokenizer=tokenizer,
        prompts=prompts,
        reward_components={name: makers[name]() for name in components},
        **{"reward_weights": {name: WEIGHTS[name] for name in components}, **settings},
    )


def _syntax(prompt: str, generated: str, full_text: str) -> float:
    return float(parses(extract_code(generated)))


def _style(ruff: str, prompt: str, generated: str, full_text: str) -> float:
    return style_score(extract_code(generated), ruff)


def _tests(
    problems: Mapping[str, CodeProblem], limits: CodeLimits, prompt: str, generated: str, full_text: str
) -> float:
    if prompt not in problems:
        raise BadInputError(f"code environment: no tests are known for the prompt {prompt!r:.80}.")
    code, tests = extract_code(generated), problems[prompt].tests
    if not parses(code):
        return 0.0
    return sum(passed_tests(code, tests, limits)) / len(tests)
