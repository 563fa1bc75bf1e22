"""The lists of mutations fit the sources: each text stands exactly once. bench/mutation.py applies them."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTS = sorted((ROOT / "tests").glob("**/mutations.py"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: str(path.parent.name))
def test_every_mutation_still_changes_its_module_and_names_a_test_that_exists(path: Path) -> None:
    for module, mutations in runpy.run_path(str(path))["MUTATIONS"].items():
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None, module
        source = Path(spec.origin).read_text()
        for old, new, test in mutations:
            assert source.count(old) == 1 and new != old, (
                f"{module}: {old!r} stands {source.count(old)} times"
            )
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


def test_every_mutant_of_the_pipeline_still_changes_its_file() -> None:
    mutants = runpy.run_path(str(ROOT / "tests/pipeline/mutants.py"))["MUTANTS"]
    for file, old, _, tests in mutants:
        source = (ROOT / "rl_cluster/pipeline" / file).read_text()
        assert source.count(old) == 1, f"{file}: {old!r} stands {source.count(old)} times"
        assert tests is None or (ROOT / f"tests/pipeline/test_pipeline_{tests}.py").is_file()
    assert len(LISTS) >= 6 and len(mutants) >= 60
