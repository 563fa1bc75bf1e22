"""How the sources hang together: lines, files, and modules that exactly one other imports.

python bench/structure.py            # the totals
python bench/structure.py --list     # and every module with a single importer
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp

PACKAGES = ("rl_cluster", "actors", "learners")
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    importers = {module: graph.find_modules_that_directly_import(module) for module in sorted(graph.modules)}
    single = {module: min(users) for module, users in importers.items() if len(users) == 1}
    print(f"source lines                        {sum(lines.values())}")
    print(f"files                               {len(files)}")
    print(f"files of 60 lines or fewer          {sum(count <= 60 for count in lines.values())}")
    print(f"files over 300 lines                {sum(count > 300 for count in lines.values())}")
    print(f"modules imported by exactly one     {len(single)}")
    if "--list" in sys.argv[1:]:
        for module, user in single.items():
            print(f"  {module}  ←  {user}")


if __name__ == "__main__":
    main()
