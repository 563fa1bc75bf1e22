"""The quickstart over several seeds: does the held-out score rise, by how much, and how long does it take.

    python bench/quickstart.py [--seeds 5] [--out runs/quickstart-seeds] [--config configs/quickstart.yaml]

Prints a table and, as its last line, one JSON object: per seed the score before and after and the seconds of
the whole command, engine starts included. Draw them with `python launch.py plot OUT/seed-* --out x.png`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(config: str, seed: int, folder: Path) -> dict[str, float]:
    """Train once in a process of its own, as a user would."""
    command = [sys.executable, str(ROOT / "launch.py"), "train", config, f"run.seed={seed}"]
    begun = time.perf_counter()
    subprocess.run([*command, f"run.dir={folder}", "log.progress=none"], cwd=ROOT, check=True)
    seconds = time.perf_counter() - begun
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [row["eval/score_mean"] for row in rows if row.get("eval/score_mean") is not None]
    return {"seed": seed, "before": scores[0], "after": scores[-1], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart-seeds"))
    parser.add_argument("--config", default="configs/quickstart.yaml")
    options = parser.parse_args()
    results = []
    print("| seed | held-out before | after | rise | seconds |\n|---:|---:|---:|---:|---:|")
    for seed in range(options.seeds):
        result = run(options.config, seed, options.out.absolute() / f"seed-{seed}")
        results.append(result)
        before, after = result["before"], result["after"]
        rise = 100 * (after - before)
        print(f"| {seed} | {before:.3f} | {after:.3f} | {rise:+.1f} | {result['seconds']:.0f} |", flush=True)
    rises = [100 * (r["after"] - r["before"]) for r in results]
    summary = {
        "runs": results,
        "smallest_rise_points": min(rises),
        "median_seconds": statistics.median(r["seconds"] for r in results),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
