"""The curves of runs: metrics.jsonl files in, a PNG out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_cluster.errors import BadInputError
from rl_cluster.run_folder.folder import RunFolder

Points = tuple[list[float], list[float]]


def series(rows: Sequence[dict[str, Any]], name: str) -> Points:
    """(steps, values) of a metric, without the steps that lack it."""
    points = [(float(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plot_runs(
    runs: Sequence[RunFolder],
    target: Path,
    names: Sequence[str] = ("eval/score_mean", "objective/scores"),
    title: str = "",
) -> Path:
    """One panel per metric, one line per run. Raises BadInputError where no run has any of the metrics."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    loaded = [(run.path.name, run.read_metrics()) for run in runs]
    present = [name for name in names if any(series(rows, name)[0] for _, rows in loaded)]
    if not present:
        raise BadInputError(f"none of the runs has any of {', '.join(names)} in its metrics.jsonl.")
    figure = Figure(figsize=(5.2 * len(present), 3.4), layout="constrained")
    panels = figure.subplots(1, len(present), squeeze=False)[0]
    for panel, name in zip(panels, present, strict=True):
        for label, rows in loaded:
            steps, values = series(rows, name)
            panel.plot(steps, values, label=label, marker="o" if len(steps) < 30 else None, markersize=3)
        panel.set_xlabel("step")
        panel.set_title(name)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    if len(loaded) > 1:
        panels[0].legend(frameon=False, fontsize=8)
    if title:
        figure.suptitle(title)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    return target
