"""Generated problems against sympy, and the reward of right, wrong and badly formed answers."""

import re
from fractions import Fraction

import pytest
import sympy

from rl_cluster.environments import MultiObjectiveRewardEnv, create_math_problem_env, make_math_problems
from rl_cluster.environments.ready.math_env import final_answer
from rl_cluster.errors import BadInputError


def solve_independently(question: str) -> Fraction:
    """The answer by sympy, read from the question alone."""
    if match := re.fullmatch(r"Solve (.+) = (-?\d+) for x\.", question):
        left = re.sub(r"(\d)x", r"\1*x", match[1])
        return Fraction(str(sympy.solve(sympy.sympify(left) - int(match[2]), "x")[0]))
    if match := re.fullmatch(r"What is the remainder when (\d+)\^(\d+) is divided by (\d+)\?", question):
        return Fraction(str(sympy.Integer(match[1]) ** int(match[2]) % int(match[3])))
    expression = re.fullmatch(r"What is (.+?)(, as a fraction)?\?", question)[1]
    return Fraction(str(sympy.sympify(expression, rational=True)))


@pytest.mark.parametrize("level", ["easy", "medium", "hard"])
def test_the_generated_answers_are_right(level):
    problems = make_math_problems(level, 60, seed=3)
    assert len({p.question for p in problems}) == 60
    for problem in problems:
        assert Fraction(problem.answer) == solve_independently(problem.question), problem


def test_the_levels_differ_in_kind():
    first_words = {
        level: {p.question.split()[0] for p in make_math_problems(level, 80)} for level in ("easy", "hard")
    }
    assert first_words == {"easy": {"What"}, "hard": {"What", "Solve"}}
    assert all("*" in p.question for p in make_math_problems("medium", 80))
    assert max(int(p.answer) for p in make_math_problems("easy", 300)) <= 40
    assert any("/" in p.answer for p in make_math_problems("hard", 80))
    assert any("remainder" in p.question for p in make_math_problems("hard", 80))


def test_problems_depend_on_the_seed_and_on_nothing_else():
    assert make_math_problems("hard", 20, seed=1) == make_math_problems("hard", 20, seed=1)
    assert make_math_problems("hard", 20, seed=1) != make_math_problems("hard", 20, seed=2)
    assert make_math_problems("easy", 30, seed=1)[:10] == make_math_problems("easy", 10, seed=1)


OWN = {"How much is 6 * 7?\n": "42", "Half of one?\n": "1/2", "Minus seven thirds?\n": "-7/3"}


@pytest.mark.parametrize(
    ("prompt", "response", "correct", "formed"),
    [
        (0, "Answer: 42", 1, 1),
        (0, "6 * 7 is 42.\nAnswer: 42.0\n", 1, 1),
        (0, "Answer: \\frac{84}{2}", 1, 1),
        (0, "Answer: $42$", 1, 1),
        (0, "It is 42.", 1, 0),
        (0, "Answer: 41", 0, 1),
        (0, "First 42.\nAnswer: 41", 0, 1),
        (0, "Answer: 41\nAnswer: 42", 1, 0),
        (0, "Answer: 40, 41, 42, 43", 0, 1),
        (0, "The correct answer is correct.", 0, 0),
        (0, "My Answer: 42", 1, 0),
        (0, "", 0, 0),
        (0, "Answer:", 0, 0),
        (1, "Answer: 0.5", 1, 1),
        (1, "Answer: 2/4", 1, 1),
        (1, "Answer: 2", 0, 1),
        (2, "Answer: -7/3", 1, 1),
        (2, "Answer: 7/3", 0, 1),
    ],
)
def test_the_reward_checks_the_answer_and_its_form(tokenizer, prompt, response, correct, formed):
    env = create_math_problem_env(tokenizer, problems=OWN)
    question = list(OWN)[prompt]
    total, parts = env.compute_multi_objective_reward(question, response, question + response)
    assert parts == {"correctness": correct, "formatting": formed}
    assert total == pytest.approx(1.0 * correct + 0.1 * formed)


def test_an_episode_of_a_generated_problem(tokenizer, ids):
    env = create_math_problem_env(tokenizer, seed=5, max_length=64, temperature=0.5)
    assert isinstance(env, MultiObjectiveRewardEnv)
    assert (env.max_length, env.temperature) == (64, 0.5)
    answers = {p.question: p.answer for p in make_math_problems("easy", 200, seed=5)}
    prompt = env.reset().prompt
    question, instruction = prompt.strip().split("\n")
    assert instruction == "Give the final answer on the last line, as: Answer: <answer>"
    result = env.step([*ids(f"Answer: {answers[question]}"), tokenizer.eos_token_id])
    assert result.reward == pytest.approx(1.1)
    assert result.metrics["reward_correctness"] == 1.0


def test_the_level_can_be_chosen_and_changed(tokenizer):
    env = create_math_problem_env(tokenizer, num_problems=12)
    questions = {
        level: [p.question for p in make_math_problems(level, 12)] for level in ("easy", "medium", "hard")
    }
    assert [p.split("\n")[0] for p in env.prompts] == questions["easy"]
    for level in ("medium", "hard", "easy"):
        env.set_difficulty(level)
        assert [p.split("\n")[0] for p in env.prompts] == questions[level]
    hard = create_math_problem_env(tokenizer, difficulty="hard", num_problems=12)
    assert hard.reset().prompt.split("\n")[0] == questions["hard"][0]


def test_the_final_answer_is_that_of_the_last_answer_line():
    assert final_answer("x\n Answer:  7 \nAnswer: 8\nend") == "8"
    assert final_answer("no such line: Answer: 3") == "no such line: Answer: 3"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"difficulty": "harder"}, "difficulty='harder'"),
        ({"num_problems": 0}, "num_problems=0"),
        ({"num_problems": 10**6}, "num_problems=1000000"),
        ({"problems": {}}, "prompts is empty"),
        ({"problems": {"What?": "nothing known"}}, "problems"),
        ({"reward_weights": {"speed": 1.0}}, "speed"),
    ],
)
def test_settings_that_cannot_work_are_named(tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        create_math_problem_env(tokenizer, **settings)
    with pytest.raises(BadInputError, match="'easier'"):
        make_math_problems("easier", 3)


def test_a_prompt_of_somebody_else_has_no_known_answer(tokenizer):
    env = create_math_problem_env(tokenizer, problems=OWN)
    with pytest.raises(BadInputError, match="no right answer is known for the prompt 'What"):
        env.score("What is 1 + 1?", "2", "What is 1 + 1?2")
