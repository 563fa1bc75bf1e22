"""What the user sees: phases, metrics and samples in; a live display, or one line per step, out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rl_cluster.protocols import SampleRow

Metrics = Mapping[str, float | None]

# (label, metric, format) in the order shown
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("score", "objective/scores", "{:.3f}"),
    ("kl", "objective/kl", "{:.3f}"),
    ("entropy", "policy/entropy_avg", "{:.3f}"),
    ("loss", "loss/policy_avg", "{:+.4f}"),
    ("no signal", "groups/without_signal", "{:.0f}"),
    ("gap", "health/logprob_gap_max", "{:.1e}"),
    ("gen tok/s", "perf/generated_tokens_per_second", "{:,.0f}"),
    ("s/step", "perf/step_seconds", "{:.2f}"),
    ("held-out", "eval/score_mean", "{:.3f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("accuracy", "train/accuracy", "{:.3f}"),
    ("held-out loss", "eval/loss", "{:.4f}"),
    ("held-out accuracy", "eval/accuracy", "{:.3f}"),
)


def summarise(metrics: Metrics) -> str:
    """`score 0.412  kl 0.031  …`, of the metrics that are there. A score that is the accuracy stands once."""
    shown = []
    for label, name, form in COLUMNS:
        value = metrics.get(name)
        again = name == "eval/accuracy" and value == metrics.get("eval/score_mean")
        if value is not None and not again:
            shown.append(f"{label} {form.format(value)}")
    return "  ".join(shown)


def sample_table(step: int, rows: Sequence[SampleRow]) -> Table:
    """As TRL prints it: query, model response, score."""
    table = Table(title=f"Samples at step {step}", show_lines=True, title_justify="left")
    table.add_column("query", overflow="fold")
    table.add_column("model response", overflow="fold")
    table.add_column("score", justify="right")
    for row in rows:
        table.add_row(Text(row.query), Text(row.response), row.score_text)
    return table


def time_left(seconds_per_step: Sequence[float], steps_left: int) -> str:
    """From the mean of the last ten steps; `--:--` before the first."""
    recent = list(seconds_per_step)[-10:]
    if not recent:
        return "--:--"
    minutes, seconds = divmod(round(sum(recent) / len(recent) * steps_left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class PlainConsole:
    """One line per step, for logs and pipes."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._total = total_steps
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._seconds: list[float] = []

    def phase(self, name: str) -> None:
        """Phases pass in seconds; a log does not need them."""

    def metrics(self, step: int, metrics: Metrics) -> None:
        seconds = metrics.get("perf/step_seconds")
        if seconds is not None:
            self._seconds.append(seconds)
        left = time_left(self._seconds, self._total - step)
        self._print(f"step {step}/{self._total}  {summarise(metrics)}  left {left}")

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._console.print(sample_table(step, rows))

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        """Nothing is held open."""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)
        self._console.file.flush()


class _Bar(Progress):
    """The summary has lines of its own under the bar."""

    summary = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.summary)


class LiveConsole:
    """A progress bar that stays at the bottom, with the lines and tables above it."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._total = total_steps
        self._seconds: list[float] = []
        self._progress = _Bar(
            TextColumn("[bold]{task.fields[phase]:<11}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=self._console,
            refresh_per_second=4,
            # What vLLM, Ray and the like write to stdout goes above the bar instead of through it.
            redirect_stdout=True,
            redirect_stderr=True,
        )
        self._task = self._progress.add_task("run", total=total_steps, phase="starting", left="--:--")
        self._progress.start()

    def phase(self, name: str) -> None:
        self._progress.update(self._task, phase=name)

    def metrics(self, step: int, metrics: Metrics) -> None:
        seconds = metrics.get("perf/step_seconds")
        if seconds is not None:
            self._seconds.append(seconds)
        left = time_left(self._seconds, self._total - step)
        self._progress.summary = summarise(metrics)
        self._progress.update(self._task, completed=step, left=left)
        if metrics.get("eval/score_mean") is not None:
            self.note(f"step {step}: {summarise(metrics)}")

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._progress.console.print(sample_table(step, rows))

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def close(self) -> None:
        self._progress.stop()


class SilentConsole:
    """log.progress: none."""

    def phase(self, name: str) -> None: ...

    def metrics(self, step: int, metrics: Metrics) -> None: ...

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


AnyConsole = PlainConsole | LiveConsole | SilentConsole


def open_console(mode: Literal["auto", "rich", "plain", "none"], total_steps: int) -> AnyConsole:
    """auto: live on a terminal, plain lines elsewhere."""
    chosen = mode if mode != "auto" else ("rich" if sys.stdout.isatty() else "plain")
    if chosen == "none":
        return SilentConsole()
    return LiveConsole(total_steps) if chosen == "rich" else PlainConsole(total_steps)
