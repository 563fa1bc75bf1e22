"""Would the tests notice? Lists of textual mutations go in, a verdict for each comes out.

    python bench/mutation.py [LIST ...]      # default: every tests/**/mutations.py

A list is a Python file with MUTATIONS = {module: [(old text, new text, "path/of/test_file.py::test_name")]}.
Each mutation is applied to the module's source in memory only; the module's package is imported afresh around
it, then the named test, and the test has to fail. Tests named here must not use pytest fixtures;
`parametrize` is understood. Exit code 1 if a mutant survives.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """Replace `old`, which stands exactly once in the module's source, by `new`; `test` must then fail."""

    module: str
    old: str
    new: str
    test: str

    def __str__(self) -> str:
        one_line = " ".join(self.old.split()), " ".join(self.new.split())
        return f"{self.module.rpartition('.')[2]}: {one_line[0]} -> {one_line[1]}"


def load_mutations(path: Path) -> list[Mutation]:
    """The mutations of one list file."""
    table = runpy.run_path(str(path))["MUTATIONS"]
    return [Mutation(module, *entry) for module, entries in table.items() for entry in entries]


def is_killed(mutation: Mutation) -> bool:
    """True if the test passes on the source as it is and fails on the mutated one."""
    source = _source_of(mutation.module)
    found = source.count(mutation.old)
    assert found == 1, f"{mutation}: the text to replace stands {found} times in the source"
    assert _passes_unmutated(mutation.test, mutation.module), f"{mutation.test} fails without any mutation"
    return _fails(mutation.test, mutation.module, source.replace(mutation.old, mutation.new))


@lru_cache
def _passes_unmutated(test: str, module: str) -> bool:
    return not _fails(test, module, _source_of(module))


def _source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _fails(test: str, module: str, source: str) -> bool:
    path, _, name = test.partition("::")
    with _imported_with(module, source):
        # Outside the try: a mutant that cannot be imported proves nothing about the test.
        importlib.import_module(module)
        function = getattr(_load_test_file(ROOT / path), name)
        try:
            for arguments in _cases(function):
                function(**arguments)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 (any failure is the answer asked for)
            return True
        return False


def _cases(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each case of a test, from its parametrize marks."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        assert mark.name == "parametrize"
        names, values = mark.args
        names = (names,) if isinstance(names, str) else names
        axes.append([dict(zip(names, v if len(names) > 1 else (v,), strict=True)) for v in values])
    for combination in itertools.product(*axes):
        yield {name: value for part in combination for name, value in part.items()}


def _load_test_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mutation_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _MutatedFinder:
    """Imports one module from the text given instead of from its file."""

    def __init__(self, module: str, source: str) -> None:
        self._module, self._source = module, source

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == self._module else None  # type: ignore[arg-type]

    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, f"<mutated {self._module}>", "exec"), module.__dict__)


@contextmanager
def _imported_with(module: str, source: str) -> Iterator[None]:
    """Within, the module's package is imported afresh, that module from `source`; then all is as before."""
    package = module.rpartition(".")[0]
    parent_name, _, child = package.rpartition(".")
    saved = {
        name: sys.modules.pop(name) for name in list(sys.modules) if f"{name}.".startswith(f"{package}.")
    }
    finder = _MutatedFinder(module, source)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
            del sys.modules[name]
        sys.modules.update(saved)
        if package in saved and parent_name in sys.modules:
            setattr(sys.modules[parent_name], child, saved[package])


def main(paths: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    lists = [Path(path) for path in paths] or sorted(ROOT.glob("tests/**/mutations.py"))
    verdicts = [(mutation, is_killed(mutation)) for path in lists for mutation in load_mutations(path)]
    for mutation, killed in verdicts:
        print(f"{'killed  ' if killed else 'SURVIVED'}  {mutation}")
    num_killed = sum(killed for _, killed in verdicts)
    print(f"{num_killed} of {len(verdicts)} mutants killed")
    return 0 if num_killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
