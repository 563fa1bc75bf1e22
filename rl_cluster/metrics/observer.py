"""The Observer of a run: phases, metrics and samples of the loop in; every sink and the console are told."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rl_cluster.config.fit import FitConfig
from rl_cluster.config.run import RunConfig
from rl_cluster.metrics.console import AnyConsole, open_console
from rl_cluster.metrics.sink import Sink, open_sinks
from rl_cluster.protocols import SampleRow
from rl_cluster.run_folder.folder import RunFolder


class RunObserver:
    """Implements protocols.Observer; a context manager that closes what it opened."""

    def __init__(self, sinks: Sequence[Sink], console: AnyConsole) -> None:
        self._sinks = tuple(sinks)
        self._console = console

    def phase(self, name: str) -> None:
        self._console.phase(name)

    def metrics(self, step: int, metrics: dict[str, float | None]) -> None:
        for sink in self._sinks:
            sink.metrics(step, metrics)
        self._console.metrics(step, metrics)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        for sink in self._sinks:
            sink.samples(step, rows)
        self._console.samples(step, rows)

    def note(self, text: str) -> None:
        """A line for the user's eyes only."""
        self._console.note(text)

    def close(self) -> None:
        self._console.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_observer(
    config: RunConfig | FitConfig,
    folder: RunFolder,
    last_step: int | None = None,
    num_steps: int | None = None,
) -> RunObserver:
    """last_step: the step of the checkpoint that a resumed run starts from; None for a new run.
    num_steps: where the configuration does not say (a fit over epochs)."""
    steps = num_steps or config.run.steps or 0
    return RunObserver(open_sinks(config, folder, last_step), open_console(config.log.progress, steps))
