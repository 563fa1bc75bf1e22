"""Would the tests notice? Samples one-place mutants of the sources and runs the tests that reach each.

    python bench/mutants.py                      # 20 mutants of each folder, about 40 minutes on 2 cores
    python bench/mutants.py loop rewards --sample 50 --seed 3 --jobs 1
    python bench/mutants.py --reuse              # with the test map of the last time

First the tests that start no cluster run once under coverage, which says for every line which tests reach it
(.mutants/map.json). A mutant is then written into a copy of the tree, and the tests that reach its line run
there, the quickest first, until one fails. Modules that run only inside workers are judged by the stack tests
of STACK_TESTS. A mutant that hangs for longer than its tests may take counts as killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutant_operators import Mutant, mutants_of, mutated

ROOT = Path(__file__).resolve().parent.parent
MAP = ROOT / ".mutants" / "map.json"
BUDGET_SECONDS = 60.0
"""Of tests per mutant, by their durations without a mutant: the quickest that fit."""
MOST_TESTS = 300
"""Per mutant: a command line has an end."""

_OF_THE_LIBRARY = (
    "algorithms",
    "modeling",
    "loop",
    "rewards",
    "data",
    "trainers",
    "pipeline",
    "reward_models",
    "losses",
)
FOLDERS = {"learners": "learners"} | {name: f"rl_cluster/{name}" for name in _OF_THE_LIBRARY}
STACK_TESTS = {
    "learners/": ["tests/learners/test_learner_ray.py", "tests/actors/test_publication.py"],
    "rl_cluster/pipeline/": ["tests/stack/test_pipeline_ray.py"],
    "rl_cluster/trainers/": ["tests/trainers/test_ppo_ray.py", "tests/trainers/test_grpo_ray.py"],
}
NEEDS_GPU = {"learners/transfer_vllm.py"}
"""Nothing here can run them; tests/gpu does, where there is a GPU."""


@dataclass(frozen=True)
class TestMap:
    """seconds: of every passing test. reaching: file → line → tests that ran it (imports aside)."""

    seconds: dict[str, float]
    reaching: dict[str, dict[int, list[str]]]

    def tests_for(self, mutant: Mutant) -> list[str]:
        """Quickest first, within the budget; of a line that an import runs, those that reach the module."""
        lines = self.reaching.get(mutant.path, {})
        wanted = lines if mutant.at_import else range(mutant.lines[0], mutant.lines[1] + 1)
        tests = {test for line in wanted for test in lines.get(line, ()) if test in self.seconds}
        chosen, total = [], 0.0
        for test in sorted(tests, key=lambda name: (self.seconds[name], name)):
            total += self.seconds[test]
            if chosen and (total > BUDGET_SECONDS or len(chosen) == MOST_TESTS):
                break
            chosen.append(test)
        return chosen or stack_tests(mutant.path)


def stack_tests(path: str) -> list[str]:
    return next((tests for start, tests in STACK_TESTS.items() if path.startswith(start)), [])


class Recorder:
    """A pytest plugin: which test reaches which line, and how long it takes."""

    def __init__(self) -> None:
        import coverage

        self._coverage = coverage.Coverage(
            source=[str(ROOT / folder) for folder in FOLDERS.values()], data_file=None, config_file=False
        )
        self._coverage.start()
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: object) -> None:
        nodeid = report.nodeid  # type: ignore[attr-defined]
        self._seconds[nodeid] += report.duration  # type: ignore[attr-defined]
        if report.outcome != "passed":  # type: ignore[attr-defined]
            self._failed.add(nodeid)

    def write(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        reaching = {
            str(Path(file).relative_to(ROOT)): {
                line: [test for test in tests if test]
                for line, tests in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        seconds = {test: s for test, s in self._seconds.items() if test not in self._failed}
        MAP.parent.mkdir(exist_ok=True)
        MAP.write_text(json.dumps({"seconds": seconds, "reaching": reaching, "failed": sorted(self._failed)}))


def record(arguments: list[str]) -> int:
    """Run the tests that start no cluster, and write the map."""
    import pytest

    recorder = Recorder()
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not stack", *arguments], plugins=[recorder])
    recorder.write()
    return int(code)


def read_map() -> TestMap:
    """The map that `record` wrote."""
    values = json.loads(MAP.read_text())
    reaching = {
        file: {int(line): tests for line, tests in lines.items()}
        for file, lines in values["reaching"].items()
    }
    return TestMap(values["seconds"], reaching)


class Copy:
    """A copy of the tree in which one mutant after the other lives; subprocesses of a test see it, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    def is_killed(self, mutant: Mutant, tests: list[str], seconds: float) -> bool:
        """True where a test fails, the mutant cannot be imported, or nothing ends in `seconds`."""
        path = self.folder / mutant.path
        source = path.read_text(encoding="utf-8")
        path.write_text(mutated(source, mutant.place), encoding="utf-8")
        try:
            return self.run(tests, seconds) not in (0, 5)
        finally:
            path.write_text(source, encoding="utf-8")

    def run(self, tests: list[str], seconds: float) -> int:
        """pytest's exit code; 124 after `seconds`. The tests' process group ends with them."""
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def sample(folders: list[str], per_folder: int, seed: int) -> list[tuple[str, Mutant]]:
    """(folder, mutant): a seeded choice of each folder's mutants."""
    chosen = []
    for folder in folders:
        files = sorted((ROOT / FOLDERS[folder]).glob("*.py"))
        paths = [str(file.relative_to(ROOT)) for file in files]
        everything = [
            mutant
            for path in paths
            if path not in NEEDS_GPU
            for mutant in mutants_of(path, (ROOT / path).read_text(encoding="utf-8"))
        ]
        generator = random.Random(f"{seed} {folder}")
        chosen += [(folder, m) for m in generator.sample(everything, min(per_folder, len(everything)))]
    return chosen


def judge(mutants: list[tuple[str, Mutant]], tests: TestMap, jobs: int) -> list[tuple[str, Mutant, bool]]:
    """(folder, mutant, killed), printed as they come."""
    copies: Queue[Copy] = Queue()

    def one(entry: tuple[str, Mutant]) -> tuple[str, Mutant, bool]:
        folder, mutant = entry
        chosen = tests.tests_for(mutant)
        expected = sum(tests.seconds.get(test, 240.0) for test in chosen)
        copied = copies.get()
        try:
            killed = bool(chosen) and copied.is_killed(mutant, chosen, 90 + 5 * expected)
        finally:
            copies.put(copied)
        print(f"{'killed  ' if killed else 'SURVIVED'} {mutant}  ({len(chosen)} tests)", flush=True)
        return folder, mutant, killed

    with tempfile.TemporaryDirectory(prefix="mutants-") as place, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            copies.put(Copy(Path(place) / str(number)))
        return list(pool.map(one, mutants))


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutants of the sources, and which survive the tests.")
    parser.add_argument("folders", nargs="*", default=list(FOLDERS), help=f"of {', '.join(FOLDERS)}")
    parser.add_argument("--sample", type=int, default=200, help="mutants in all, equally many of each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--reuse", action="store_true", help="the test map of the last time")
    options = parser.parse_args()
    unknown = [folder for folder in options.folders if folder not in FOLDERS]
    if unknown:
        parser.error(f"unknown folder {unknown[0]!r}; one of {', '.join(FOLDERS)}")
    if not options.reuse or not MAP.is_file():
        recording = [sys.executable, __file__, "--record"]
        subprocess.run(recording, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    tests, begun = read_map(), time.perf_counter()
    mutants = sample(options.folders, -(-options.sample // len(options.folders)), options.seed)
    verdicts = judge(mutants, tests, options.jobs)
    print(f"\nseed {options.seed}, {len(verdicts)} mutants, {time.perf_counter() - begun:.0f} s\n")
    print("| folder | killed | of |\n|---|---|---|")
    for folder in options.folders:
        of_folder = [killed for name, _, killed in verdicts if name == folder]
        print(f"| {folder} | {sum(of_folder)} | {len(of_folder)} |")
    survivors = [mutant for _, mutant, killed in verdicts if not killed]
    print("\nsurvivors:" if survivors else "\nno survivors")
    for mutant in survivors:
        print(f"- {mutant}")
    return 0


if __name__ == "__main__":
    sys.exit(record(sys.argv[2:]) if sys.argv[1:2] == ["--record"] else main())
