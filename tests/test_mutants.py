"""bench/mutants.py: the mutants that it makes, and that its verdicts follow from the tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import mutants
from mutant_operators import Mutant, mutants_of, mutated

SOURCE = '''"""Doc."""
LIMIT = 3

def mean(values: list[int] = [], scale=2.0):
    """Doc 1 + 1."""
    assert len(values) > 0
    if not values or scale < 0:
        raise ValueError(f"{1 + 1}")
    log(values, scale)
    return f(values, key=True).detach() + LIMIT
'''


def test_every_place_is_mutated_once_in_each_way_and_messages_are_left_alone():
    found = {(m.lines[0], m.before, m.after) for m in mutants_of("m.py", SOURCE)}
    assert found == {
        (2, "3", "4"),
        (4, "2.0", "4.0"),
        (7, "if not values or scale < 0:\n    raise ValueError(f'{1 + 1}')", _IF_NOT),
        (7, "not values or scale < 0", "not values and scale < 0"),
        (7, "not values", "values"),
        (7, "scale < 0", "scale <= 0"),
        (7, "0", "1"),
        (9, "log(values, scale)", "pass"),
        (9, "log(values, scale)", "log(scale, values)"),
        (10, "f(values, key=True).detach() + LIMIT", "f(values, key=True).detach() - LIMIT"),
        (10, "f(values, key=True).detach()", "f(values, key=True)"),
        (10, "f(values, key=True)", "f(values)"),
        (10, "True", "False"),
    }


_IF_NOT = "if not (not values or scale < 0):\n    raise ValueError(f'{1 + 1}')"


def test_a_mutated_source_differs_in_that_one_place():
    import ast

    whole = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant in mutants_of("m.py", SOURCE):
        lines = mutated(SOURCE, mutant.place).splitlines()
        assert sum(a != b for a, b in zip(whole, lines, strict=True)) == 1, mutant


def test_a_module_level_line_is_told_from_one_inside_a_function():
    at_import = {m.before: m.at_import for m in mutants_of("m.py", SOURCE)}
    assert at_import["3"] and not at_import["not values"]


def _test_map() -> mutants.TestMap:
    seconds = {"slow": 50.0, "quick": 1.0, "middle": 20.0}
    reaching = {"learners/rank.py": {3: ["slow", "quick"], 4: ["middle", "failing"], 9: ["quick"]}}
    return mutants.TestMap(seconds, reaching)


@pytest.mark.parametrize(
    ("lines", "at_import", "tests"),
    [
        ((3, 3), False, ["quick", "slow"]),
        ((3, 4), False, ["quick", "middle"]),  # the slow one would pass the budget of 60 s
        ((1, 1), True, ["quick", "middle"]),
        ((7, 8), False, ["tests/learners/test_learner_ray.py", "tests/actors/test_publication.py"]),
    ],
)
def test_the_quickest_tests_that_reach_a_line_are_chosen(lines, at_import, tests):
    mutant = Mutant("learners/rank.py", 0, lines, at_import, "a", "b")
    assert _test_map().tests_for(mutant) == tests


def test_a_sample_is_seeded_and_spread_over_the_folders():
    first, again = (mutants.sample(["loop", "data"], 5, seed=1) for _ in range(2))
    assert first == again != mutants.sample(["loop", "data"], 5, seed=2)
    assert [folder for folder, _ in first] == ["loop"] * 5 + ["data"] * 5


def test_a_mutant_dies_by_a_test_that_looks_and_survives_one_that_does_not(tmp_path):
    path = "rl_cluster/algorithms/kl.py"
    source = (mutants.ROOT / path).read_text()
    mutant = next(m for m in mutants_of(path, source) if m.before == "0.5 * d.square()")
    copied = mutants.Copy(tmp_path)
    assert copied.is_killed(mutant, ["tests/algorithms/test_kl.py"], 120)
    assert not copied.is_killed(mutant, ["tests/algorithms/test_grid.py"], 120)
    assert (tmp_path / path).read_text() == source
