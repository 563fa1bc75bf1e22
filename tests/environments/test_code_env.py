"""Code rewards: parsing, style, and unit tests in a process with limits."""

import ast
import os
import select
import subprocess
import sys

import pytest

from rl_cluster.environments import (
    CodeLimits,
    CodeProblem,
    CodeTest,
    create_code_generation_env,
)
from rl_cluster.environments.ready import code_env, code_text
from rl_cluster.environments.ready.code_problems import PROBLEMS
from rl_cluster.environments.ready.code_runner import passed_tests, run_calls, same_value
from rl_cluster.environments.ready.code_text import extract_code, find_ruff, parses, style_score
from rl_cluster.errors import BadInputError, ScorerError

LIMITS = CodeLimits(seconds=20.0)
ADD = "def add(a, b):\n    return a + b\n"
PROBLEM = CodeProblem("Write add.\n", (CodeTest("add(2, 3)", 5), CodeTest("add('a', 'b')", "ab")))


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nor better\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\ny = 2", "x = 1\ny = 2"),
        ("", ""),
    ],
)
def test_the_code_of_a_response(response, code):
    assert extract_code(response) == code


@pytest.mark.parametrize(
    ("code", "good"),
    [
        (ADD, True),
        ("def add(a, b) return a", False),
        ("", False),
        ("# only a comment\n", False),
        ("x = '\0'", False),
        ("(" * 5000, False),
        ("x = 1\n" * 20_000, False),
        ("if x is 1: pass", True),
    ],
)
def test_what_parses(code, good):
    assert parses(code) is good


def test_parsing_executes_nothing(tmp_path):
    target = tmp_path / "made"
    assert parses(f"open({str(target)!r}, 'w')")
    assert not target.exists()


def test_style_falls_with_every_finding_of_ruff():
    ruff = find_ruff()
    assert style_score(ADD, ruff) == 1.0
    assert style_score("import os\n" + ADD, ruff) == 0.5
    assert style_score("import os\nimport sys\n" + ADD, ruff) == pytest.approx(1 / 3)
    assert style_score("def (", ruff) == 0.0
    assert style_score("", ruff) == 0.0


def test_style_does_not_depend_on_the_folder(tmp_path, monkeypatch):
    (tmp_path / "ruff.toml").write_text('lint.ignore = ["F401"]\n')
    monkeypatch.chdir(tmp_path)
    assert style_score("import os\n" + ADD, find_ruff()) == 0.5


def test_a_missing_ruff_is_named_with_its_remedy(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "ruff", None)
    with pytest.raises(BadInputError, match=r"needs the program ruff.*pip install ruff"):
        create_code_generation_env(tokenizer)
    env = create_code_generation_env(tokenizer, components=("syntax", "tests"))
    assert env.reward_weights == {"syntax": 0.1, "tests": 1.0}


def test_a_ruff_that_fails_is_an_error_and_no_bad_style(tmp_path):
    broken = tmp_path / "ruff"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    for program in (broken, tmp_path / "absent"):
        with pytest.raises(ScorerError, match="failed"):
            style_score(ADD, str(program))


def test_values_come_back_and_errors_are_told():
    code = ADD + "import math\nclass Odd:\n    pass\n"
    calls = ["add(1, 2)", "add(1)", "(add(0.5, 1), {'k': [True, None]})", "Odd()", "1 +", "math.inf"]
    results = run_calls(code, calls, LIMITS)
    assert [r.ok for r in results] == [True, False, True, False, False, False]
    assert results[0].value == 3
    assert results[2].value == (1.5, {"k": [True, None]})
    assert "TypeError: add() missing 1 required positional argument" in results[1].error
    assert "no plain value" in results[3].error
    assert "SyntaxError" in results[4].error


def test_code_that_fails_as_a_whole_fails_every_call():
    results = run_calls("import absent_module", ["1", "2"], LIMITS)
    assert ["ModuleNotFoundError" in r.error for r in results] == [True, True]
    assert [r.ok for r in run_calls("import sys\nsys.exit(0)", ["1"], LIMITS)] == [False]
    ended = run_calls("import os\ndef f():\n    os._exit(0)", ["1", "f()", "2"], LIMITS)
    assert [(r.ok, r.error) for r in ended] == [
        (True, ""),
        (False, "the code ended the process"),
        (False, "the code ended the process"),
    ]


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1, 1, True),
        (True, 1, False),
        (1.0, 1, False),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        ([1, (2, 3)], [1, (2, 3)], True),
        ([1, [2, 3]], [1, (2, 3)], False),
        ([1, 2], [1], False),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({1, 2}, {2, 1}, True),
        (None, None, True),
    ],
)
def test_what_counts_as_the_expected_value(value, expected, same):
    assert same_value(value, expected) is same


def test_the_expected_values_are_out_of_the_codes_reach():
    """Code that reads everything it can find does not find 917263, which is only in the parent."""
    snoop = (
        "import gc, sys\n"
        "def f():\n"
        "    frames, frame = [], sys._getframe()\n"
        "    while frame:\n"
        "        frames.append((frame.f_locals, frame.f_globals))\n"
        "        frame = frame.f_back\n"
        "    return '362719'[::-1] in str(frames) + str(gc.get_objects())\n"
    )
    tests = [CodeTest("f()", False), CodeTest("1 + 1", 917263)]
    assert passed_tests(snoop, tests, LIMITS) == [True, False]


def test_an_endless_loop_ends_at_the_limit_and_keeps_earlier_results():
    results = run_calls("def f():\n    while True: pass", ["1", "f()", "2"], CodeLimits(seconds=1.5))
    assert [(r.ok, r.value) for r in results] == [(True, 1), (False, None), (False, None)]
    assert "timeout" in results[1].error or "SIGXCPU" in results[1].error or "SIGKILL" in results[1].error


def test_sleeping_counts_too():
    results = run_calls("import time", ["time.sleep(600)"], CodeLimits(seconds=1.0))
    assert results[0].error == "timeout"


def test_memory_files_and_open_files_are_limited():
    limits = CodeLimits(seconds=20.0, memory_bytes=128 * 1024**2, file_bytes=4096, open_files=16)
    calls = [
        "len(bytearray(400 * 1024 ** 2))",
        "len(bytearray(4 * 1024 ** 2))",
        "write(100_000)",
        "write(1000)",
        "opened()",
    ]
    code = (
        "def write(n):\n"
        "    with open('f', 'w') as f:\n"
        "        return f.write('x' * n)\n"
        "def opened():\n"
        "    return len([open('f') for _ in range(100)])\n"
    )
    results = run_calls(code, calls, limits)
    assert "MemoryError" in results[0].error
    assert results[1].value == 4 * 1024**2
    assert "File too large" in results[2].error
    assert results[3].value == 1000
    assert "Too many open files" in results[4].error


def test_the_code_runs_with_limits_on_processes_and_privileges():
    code = "import resource\nstatus = dict(l.split(':', 1) for l in open('/proc/self/status'))\n"
    calls = ["resource.getrlimit(resource.RLIMIT_NPROC)", "status['NoNewPrivs'].strip()"]
    calls += ["resource.getrlimit(resource.RLIMIT_CORE)", "resource.getrlimit(resource.RLIMIT_CPU)"]
    results = run_calls(code, calls, CodeLimits(seconds=7.2, processes=3))
    assert [r.value for r in results] == [(3, 3), "1", (0, 0), (8, 8)]


@pytest.mark.skipif(os.geteuid() == 0, reason="the system does not hold root to RLIMIT_NPROC")
def test_no_process_can_be_started():
    results = run_calls("import os", ["os.fork()"], LIMITS)
    assert "Resource temporarily unavailable" in results[0].error


def test_what_the_code_started_dies_with_it(tmp_path):
    """The child holds a pipe open for writing: its reader sees the end only when the last holder is gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code = (
        "import subprocess\n"
        f"holds = 'exec 2>{pipe}; echo alive; echo here >&2; exec sleep 3600'\n"
        "child = subprocess.Popen(['/bin/sh', '-c', holds], stdout=subprocess.PIPE)\n"
    )
    calls = ["child.stdout.readline()", "child.poll()"]
    results = run_calls(code, calls, CodeLimits(seconds=60.0, processes=100_000))
    assert [(r.ok, r.value) for r in results] == [(True, b"alive\n"), (True, None)], results
    written, chunk = b"", b" "
    while chunk:
        assert select.select([reader], [], [], 60)[0], "somebody still holds the pipe"
        chunk = os.read(reader, 100)
        written += chunk
    os.close(reader)
    assert written in (b"", b"here\n")


def test_the_environment_and_the_folder_are_clean(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    calls = ["sorted(os.environ)", "os.listdir('.')", "os.getcwd()", "sys.path.count('')", "__name__"]
    results = run_calls("import os, sys", calls, LIMITS)
    assert set(results[0].value) <= {"HOME", "LANG", "LC_CTYPE", "PATH", "TMPDIR"}
    assert results[1].value == []
    assert not os.path.exists(results[2].value), "the folder is deleted afterwards"
    assert results[4].value == "answer"


def test_output_goes_nowhere():
    results = run_calls(
        "print('x' * 10_000_000)\nimport sys\nsys.stderr.write('y' * 10_000_000)", ["1"], LIMITS
    )
    assert results[0].value == 1


REFERENCE = {
    "factorial": "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
    "is_even": "def is_even(n):\n    return n % 2 == 0",
    "reverse_words": "def reverse_words(text):\n    return ' '.join(reversed(text.split()))",
    "count_vowels": "def count_vowels(text):\n    return sum(c in 'aeiou' for c in text.lower())",
    "is_prime": "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))",
    "flatten": """
def flatten(items):
    return [b for a in items for b in (flatten(a) if isinstance(a, list) else [a])]""",
    "run_lengths": """
import itertools
def run_lengths(text):
    return [(k, len(list(g))) for k, g in itertools.groupby(text)]""",
    "gcd": "def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)",
    "edit_distance": """
def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]""",
    "longest_increasing": """
import bisect
def longest_increasing(values):
    tails = []
    for v in values:
        i = bisect.bisect_left(tails, v)
        tails[i:i + 1] = [v]
    return len(tails)""",
    "evaluate": """
import ast, operator
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
def evaluate(expression):
    def value(node):
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        if isinstance(node, ast.BinOp):
            return SIGNS[type(node.op)](value(node.left), value(node.right))
        return node.value
    return value(ast.parse(expression, mode='eval').body)""",
    "topological_order": """
def topological_order(edges):
    nodes, done = {n for e in edges for n in e}, []
    while nodes:
        free = [n for n in nodes if not any(b == n and a in nodes for a, b in edges)]
        if not free:
            return None
        done.append(min(free))
        nodes.remove(min(free))
    return done""",
}


@pytest.mark.parametrize("level", ["easy", "medium", "hard"])
def test_a_right_solution_passes_all_tests_of_every_built_in_problem(level):
    for problem in PROBLEMS[level]:
        name = problem.prompt.split("`")[1].split("(")[0]
        assert all(passed_tests(REFERENCE[name], problem.tests, LIMITS)), name
        assert not any(passed_tests(f"def {name}(*a):\n    return 'wrong'", problem.tests, LIMITS)), name
        for test in problem.tests:
            assert ast.literal_eval(repr(test.expected)) == test.expected


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        (f"```python\n{ADD}```", {"syntax": 1.0, "style": 1.0, "tests": 1.0}),
        ("def add(a, b):\n    return 5\n", {"syntax": 1.0, "style": 1.0, "tests": 0.5}),
        ("import os\n" + ADD, {"syntax": 1.0, "style": 0.5, "tests": 1.0}),
        ("def add(", {"syntax": 0.0, "style": 0.0, "tests": 0.0}),
        ("", {"syntax": 0.0, "style": 0.0, "tests": 0.0}),
    ],
)
def test_the_reward_is_the_weighted_sum_of_syntax_style_and_tests(tokenizer, response, parts):
    env = create_code_generation_env(tokenizer, problems=[PROBLEM], limits=LIMITS)
    total, found = env.compute_multi_objective_reward(PROBLEM.prompt, response, PROBLEM.prompt + response)
    assert found == pytest.approx(parts)
    assert total == pytest.approx(0.1 * parts["syntax"] + 0.1 * parts["style"] + parts["tests"])


def test_an_episode_and_its_levels(tokenizer, ids):
    env = create_code_generation_env(tokenizer, limits=LIMITS, max_length=2000)
    assert env.reset().prompt == PROBLEMS["easy"][0].prompt
    result = env.step([*ids(REFERENCE["factorial"]), tokenizer.eos_token_id])
    assert result.metrics["reward_tests"] == 1.0
    assert result.reward == pytest.approx(1.2)
    env.set_difficulty("hard")
    assert env.reset().prompt == PROBLEMS["hard"][0].prompt
    assert (
        create_code_generation_env(tokenizer, difficulty="medium").prompts[0] == PROBLEMS["medium"][0].prompt
    )


def test_code_that_does_not_parse_starts_no_process(tokenizer, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    monkeypatch.setattr(code_env, "find_ruff", lambda: "unused")
    env = create_code_generation_env(tokenizer, problems=[PROBLEM])
    assert env.score(PROBLEM.prompt, "def (", "")[0] == 0.0
    assert code_text.style_score("def (", "unused") == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"difficulty": "harder"}, "difficulty='harder'"),
        ({"components": ("syntax", "speed")}, "components"),
        ({"components": ()}, "components"),
        ({"components": "syntax"}, "components"),
        ({"problems": []}, "prompts is empty"),
        ({"problems": [CodeProblem("p", ())]}, r"problems\[0\]"),
        ({"problems": ["p"]}, r"problems\[0\]"),
    ],
)
def test_settings_that_cannot_work_are_named(tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        create_code_generation_env(tokenizer, **settings)


@pytest.mark.parametrize("field", ["seconds", "memory_bytes", "file_bytes", "open_files"])
def test_limits_that_cannot_work_are_named(field):
    with pytest.raises(BadInputError, match=f"CodeLimits.{field}=0"):
        CodeLimits(**{field: 0})


def test_a_prompt_of_somebody_else_has_no_known_tests(tokenizer):
    env = create_code_generation_env(tokenizer, problems=[PROBLEM], components=("tests",))
    with pytest.raises(BadInputError, match="no tests are known for the prompt 'other'"):
        env.score("other", ADD, "")
