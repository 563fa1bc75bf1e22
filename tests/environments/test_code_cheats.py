"""Ways to be paid without solving the problem: each is worth 0, and none of them raises in the parent."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import pytest

from rl_cluster.environments import CodeLimits, CodeProblem, CodeTest, create_code_generation_env
from rl_cluster.environments.ready import code_problems as problems_module
from rl_cluster.environments.ready.code_problems import PROBLEMS
from rl_cluster.environments.ready.code_runner import passed_tests, run_calls
from rl_cluster.environments.ready.code_text import find_ruff, style_score
from rl_cluster.environments.ready.code_values import read_results
from tests.environments.test_code_env import REFERENCE

LIMITS = CodeLimits(seconds=20.0)
HERE = str(Path(problems_module.__file__).parent)
ALL = [problem for level in PROBLEMS.values() for problem in level]

READ_THE_PROBLEMS = f"""
import sys
def find():
    folders = [{HERE!r}, *sys.path]
    main = getattr(sys.modules.get('__main__'), '__file__', None)
    folders += [main.rpartition('/')[0]] if main else []
    for folder in folders:
        try:
            return open(folder + '/code_problems.py').read()
        except OSError:
            pass
text = find()
known = {{}}
if text:
    space = {{'__name__': 'stolen', 'Any': object, 'Mapping': dict, 'dataclass': lambda **k: (lambda c: c)}}
    for line in text.splitlines():
        if line.strip().startswith('"') and '": ' in line:
            call, _, value = line.strip().rstrip(',').partition('": ')
            known[call.strip('"')] = eval(value)
"""
LOOK_UP = """
def answers(name):
    return lambda *a: known.get(f"{name}({', '.join(map(repr, a))})")
for call in known:
    globals()[call.split('(')[0]] = answers(call.split('(')[0])
"""
"""The stolen values, if the file can be read."""

REPLACE_THE_CALLS = """
import sys
frame = sys._getframe()
while frame:
    for order in (*frame.f_locals.values(), *frame.f_globals.values()):
        if isinstance(order, dict) and 'calls' in order:
            order['calls'] = [repr(known.get(call)) for call in order['calls']]
    if 'calls' in frame.f_locals:
        frame.f_locals['calls'] = tuple(repr(known.get(call)) for call in frame.f_locals['calls'])
    frame = frame.f_back
"""

PATCH_BUILTINS = """
import builtins, json
right = builtins.eval
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __repr__(self): return '5'
builtins.eval = lambda *a, **k: Same()
builtins.compile = lambda source, *a, **k: source
builtins.repr = lambda v: '5'
builtins.type = lambda v: int
json.dumps = lambda *a, **k: '[0, ["int", "0x5"], ""]'
"""

FORGE = """
import atexit, os, sys
token = ''
frame = sys._getframe()
while frame:
    token = frame.f_locals.get('token') or token
    frame = frame.f_back
def forge():
    for descriptor in range(3, 16):
        for index in range(12):
            for value in ('["bool", true]', '["int", "0x1"]', '["list", []]', '["N"]'):
                try:
                    os.write(descriptor, f'{token} [{index}, {value}, ""]\\n'.encode())
                except OSError:
                    break
print('[0, true, ""]')
"""

CHEATS = {
    "the previous attack: read the problems, replace the calls": READ_THE_PROBLEMS + REPLACE_THE_CALLS,
    "the problems' values in functions": READ_THE_PROBLEMS + LOOK_UP,
    "monkey-patched builtins": PATCH_BUILTINS,
    "forged results, then exit": FORGE + "forge()\nsys.exit(0)",
    "forged results, then a hard exit": FORGE + "forge()\nos._exit(0)",
    "forged results at exit": FORGE + "atexit.register(forge)\n",
    "a main module of its own": (
        "import sys, types\nfake = types.ModuleType('__main__')\nfake.passed_tests = lambda *a: [True] * 9\n"
        "sys.modules['__main__'] = fake\nsys.modules['answer'] = fake\nsys.exit(0)"
    ),
    "the package itself": (
        f"import sys\nsys.path[:0] = [{str(Path(HERE).parents[1])!r}, {sysconfig.get_paths()['purelib']!r}]\n"
        "from rl_cluster.environments.ready.code_problems import PROBLEMS\n"
        "known = {t.call: t.expected for made in PROBLEMS.values() for p in made for t in p.tests}\n"
        + LOOK_UP
        + REPLACE_THE_CALLS
    ),
    "the parent's memory": (
        "import os\nmaps = open(f'/proc/{os.getppid()}/maps').read()\n"
        "memory = open(f'/proc/{os.getppid()}/mem', 'rb')\n"
    ),
    "equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "import builtins\nfor call in ('factorial', 'is_even', 'gcd', 'is_prime', 'flatten', 'evaluate'):\n"
        "    globals()[call] = lambda *a: Any(1)\n"
    ),
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
def test_a_cheat_passes_no_test_of_any_built_in_problem(cheat: str) -> None:
    assert sum(len(problem.tests) for problem in ALL) == 41
    for problem in ALL:
        assert not any(passed_tests(cheat, problem.tests, LIMITS)), problem.prompt


def test_honest_code_is_not_disturbed_by_what_stops_the_cheats() -> None:
    uses = (
        "import asyncio, collections, dataclasses, decimal, enum, fractions, functools, heapq\n"
        "import math, random, re, statistics, string, tempfile, textwrap, threading, typing\n"
        "Point = collections.namedtuple('Point', 'x y')\n"
        "@dataclasses.dataclass\nclass Box:\n    size: int\n"
        "async def later():\n    return Box(2).size + Point(1, 2).y\n"
        "def f():\n    with open('notes.txt', 'w') as file:\n        file.write('7')\n"
        "    return asyncio.run(later()) + int(open('notes.txt').read())\n"
    )
    assert [result.value for result in run_calls(uses, ["f()", "2 ** 20000 % 7"], LIMITS)] == [
        11,
        2**20000 % 7,
    ]
    for problem in ALL:
        name = problem.prompt.split("`")[1].split("(")[0]
        assert all(passed_tests(REFERENCE[name], problem.tests, LIMITS)), name


@pytest.mark.parametrize(
    "doing",
    [
        f"open({HERE + '/code_problems.py'!r}).read()",
        "open('/etc/passwd').read()",
        "open(os.getcwd() + '/../../etc/passwd').read()",
        "os.listdir('/')",
        "os.symlink('/etc', 'etc')",
        "os.link('/etc/passwd', 'copy')",
        "os.kill(os.getppid(), 0)",
        "__import__('ctypes')",
        "__import__('_xxsubinterpreters')",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
        "os.system('true')",
        "os.execv('/bin/true', ['true'])",
        f"open({sys.executable!r}, 'rb').read(4)",
        "open(type('P', (str,), {})('/etc/passwd')).read()",
        "open(b'/etc/passwd').read()",
        "load('x._ctypes', *[LIB + '/' + f for f in os.listdir(LIB) if f.startswith('_ctypes.')])",
        "load('mine', write('mine.so'))",
        "os.open('mine.py', os.O_WRONLY | os.O_CREAT, dir_fd=os.open(os.path.dirname(os.__file__), 0))",
        "os.fchdir(os.open(os.path.dirname(os.__file__), os.O_RDONLY))",
    ],
)
def test_files_processes_and_the_network_are_out_of_reach(doing: str) -> None:
    code = (
        "import os, sys, importlib.util as util\n"
        "LIB = sys.path[-1]\n"
        "def load(*where):\n    return util.module_from_spec(util.spec_from_file_location(*where)).__name__\n"
        "def write(name):\n    open(name, 'w').write('x')\n    return os.path.abspath(name)\n"
    )
    (result,) = run_calls(code, [doing], LIMITS)
    assert not result.ok
    assert any(word in result.error for word in ("PermissionError", "BlockingIOError")), result.error


TOKEN = "t" * 32
GOOD = f'{TOKEN} [-1, ["N"], ""]\n{TOKEN} [0, ["int", "0x5"], ""]\n'


@pytest.mark.parametrize(
    "line",
    [
        '[Infinity,"1",""]',
        "[" * 100_000,
        "[NaN, null, null]",
        '[0, ["int", "0x5"], ""]',
        '[1, ["int", "zz"], ""]',
        '[true, ["int", "0x5"], ""]',
        '[1e400, ["N"], ""]',
        '[7, ["N"], ""]',
        '[-2, ["N"], ""]',
        '[1, ["float", "inf"], ""]',
        '[1, ["set", [["list", []]]], ""]',
        '[1, ["dict", [["N"]]], ""]',
        '[1, ["bool", 1], ""]',
        "{}",
        "",
        "[1, " + '["list", [' * 500 + '["N"]' + "]]" * 500 + ', ""]',
        '[1, ["int", "' + "9" * 5000 + '"], null]',
    ],
    ids=range(17),
)
def test_whatever_is_written_with_the_token_is_a_failure_and_never_an_error(line: str) -> None:
    assert read_results(GOOD.encode(), TOKEN, 2, "")[0].value == 5
    results = read_results((GOOD + TOKEN + " " + line + "\n").encode(), TOKEN, 2, "")
    assert [result.ok for result in results] == [False, False]
    assert read_results((line + "\n").encode() + GOOD.encode(), TOKEN, 2, "")[0].ok, "without it: ignored"
    json.dumps([result.error for result in results])


def test_bytes_of_any_kind_and_too_much_output_are_failures() -> None:
    assert not read_results(b"\xff\xfe\n\0" * 50, TOKEN, 1, "")[0].ok
    flood = "import os\nfor _ in range(200):\n    os.write(3, b'x' * 100_000)\n"
    assert run_calls(flood, ["1"], LIMITS)[0].error == "too much output"
    deep = "def f():\n    a = []\n    for _ in range(9999):\n        a = [a]\n    return a\n"
    results = run_calls(deep, ["f()", "float('nan')", "10 ** 5000 == 1"], LIMITS)
    assert [r.ok for r in results] == [False, False, True]


ADD = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    "comment",
    [
        "# ruff: noqa\n",
        "# ruff: noqa: F401\n",
        "# flake8: noqa\n",
        "# RUFF: NOQA\n",
        "# ruff: disable[F401]\n",
        "# isort: skip_file\n",
        '# /// script\n# requires-python = ">=3.3"\n# ///\n',
        "# -*- coding: utf-7 -*-\n",
        "# fmt: off\n",
        "# pylint: skip-file\n# type: ignore\n",
    ],
)
def test_no_comment_lifts_the_style(comment: str) -> None:
    ruff = find_ruff()
    assert style_score(comment + "import os\n" + ADD, ruff) <= 0.5
    assert style_score("import os  # noqa\n" + ADD, ruff) == 0.5
    assert style_score(comment + "import os  # noqa: F401\n" + ADD, ruff) <= 0.5
    old = "from typing import List\n\n\ndef f(a: List[int]):\n    return a\n"
    assert style_score(comment + old, ruff) <= style_score(old, ruff) < 1.0


@pytest.mark.parametrize(
    ("test", "told"),
    [
        (CodeTest("add(2, 3", 5), r"problems\[0\].tests\[0\].call='add\(2, 3': is no Python expression"),
        (CodeTest("", 5), "is no Python expression"),
        (CodeTest("x = add(1, 2)", 5), "is no Python expression"),
        (CodeTest("1 + 1", 2), "uses nothing that an answer defines"),
        (CodeTest("len([1])", 1), "uses nothing that an answer defines"),
        (CodeTest("add(1, 2)", float("nan")), "expected=nan: is not finite"),
        (CodeTest("add(1, 2)", [1, float("inf")]), "is not finite"),
        (CodeTest("add(1, 2)", object()), "is of type object"),
        (CodeTest("add(1, 2)", {"a": {1: lambda: 3}}), "is of type function"),
        (CodeTest(3, 3), r"must be a CodeTest"),  # type: ignore[arg-type]
        ("add(1, 2)", r"must be a CodeTest"),
    ],
)
def test_tests_that_nobody_could_pass_or_everybody_would_are_refused(tokenizer, test, told) -> None:
    with pytest.raises(ValueError, match=told):
        create_code_generation_env(tokenizer, problems=[CodeProblem("Write add.\n", (test,))])


def test_two_problems_with_one_prompt_are_refused(tokenizer) -> None:
    problem = CodeProblem("Write add.\n", (CodeTest("add(1, 2)", 3),))
    with pytest.raises(ValueError, match=r"problems\[1\]: has the prompt of problems\[0\]"):
        create_code_generation_env(tokenizer, problems=[problem, problem])
