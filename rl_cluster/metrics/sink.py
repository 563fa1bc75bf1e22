"""Where metrics go: one step's metrics in; a line of metrics.jsonl, TensorBoard events, W&B points out."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from io import SEEK_END, FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rl_cluster.config.fit import FitConfig
from rl_cluster.config.run import RunConfig
from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.files.atomic import write_atomically
from rl_cluster.files.json_lines import ROW_FILE, finite, read_steps, row_text, split_lines
from rl_cluster.protocols import SampleRow
from rl_cluster.run_folder.claim import claim_of
from rl_cluster.run_folder.folder import RunFolder

Metrics = Mapping[str, float | None]


class Sink(Protocol):
    """A destination; `close` writes out what is left."""

    def metrics(self, step: int, metrics: Metrics) -> None: ...

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl and samples.jsonl: one object per line, flushed, so that a killed run loses none.

    On resume the steps after `last_step` are cut off: they will be trained again. A step has one line: what
    comes to one later, such as an evaluation that had failed, is added to it.
    """

    def __init__(self, folder: RunFolder, last_step: int | None = None) -> None:
        self._claim = claim_of(folder.path)
        if last_step is not None:
            for path in (folder.metrics, folder.alarms, folder.samples):
                _truncate_after(path, last_step)
            _restore_row(folder, last_step)
        self._last = _last_row(folder.metrics)
        self._metrics = open(folder.metrics, "ab", buffering=0)
        self._samples = open(folder.samples, "ab", buffering=0)

    def metrics(self, step: int, metrics: Metrics) -> None:
        if self._claim is not None:
            self._claim.lock.check()
        line = row_text(step, metrics)
        if self._last is not None and self._last["step"] == step:
            line = json.dumps(self._last | json.loads(line))
            self._replace_last(line)
        else:
            _append(self._metrics, line)
        self._last = json.loads(line)

    def _replace_last(self, line: str) -> None:
        path = Path(self._metrics.name)
        lines = split_lines(path.read_bytes())
        write_atomically(path, b"".join(one + b"\n" for one in [*lines[:-1], line.encode()]))
        self._metrics.close()
        self._metrics = open(path, "ab", buffering=0)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        for row in rows:
            line = {"step": step, "query": row.query, "response": row.response, "score": finite(row.score)}
            _append(self._samples, json.dumps(line, ensure_ascii=False))

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _append(file: FileIO, line: str) -> None:
    """The whole line or nothing of it. A lone surrogate becomes the escape that JSON has for it."""
    end, data = file.seek(0, SEEK_END), line.encode(errors="backslashreplace") + b"\n"
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        file.truncate(end)
        raise CheckpointError(
            f"{file.name} could not be written: {error}. Free space, then go on from the newest checkpoint."
        ) from error


def _truncate_after(path: Path, last_step: int) -> None:
    """Raises BadInputError for a damaged line; the file is as it was then."""
    if not path.is_file():
        return
    kept = b"".join(line for line, row in read_steps(path) if row["step"] <= last_step)
    if kept != path.read_bytes():
        write_atomically(path, kept)


def _restore_row(folder: RunFolder, step: int) -> None:
    """The run died between the step's checkpoint and its line: the checkpoint has it, too."""
    file = folder.checkpoint(step) / ROW_FILE
    last = _last_row(folder.metrics)
    if not file.is_file() or (last is not None and last["step"] >= step):
        return
    with open(folder.metrics, "ab", buffering=0) as metrics:
        _append(metrics, file.read_text(encoding="utf-8").rstrip("\n"))


def _last_row(path: Path) -> dict[str, Any] | None:
    """Raises BadInputError for a damaged line."""
    rows = deque((row for _, row in read_steps(path)), maxlen=1) if path.is_file() else ()
    return rows[0] if rows else None


class TensorBoard:
    """Event files through TensorBoard's own writer; torch is not needed."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def metrics(self, step: int, metrics: Metrics) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if value is not None
        ]
        self._write(step, Summary(value=values))

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        head = "| query | model response | score |\n|---|---|---|\n"
        body = "\n".join(f"| {_cell(r.query)} | {_cell(r.response)} | {r.score_text} |" for r in rows)
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[(head + body).encode()], tensor_shape=shape)
        text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._write(step, Summary(value=[Summary.Value(tag="samples", metadata=text, tensor=tensor)]))

    def _write(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "⏎")


class WeightsAndBiases:
    """The optional package wandb; config/checks/run.py has made sure that it is installed.

    Its own variables hold, such as WANDB_MODE=offline. Raises BadInputError where it cannot start.
    """

    def __init__(self, project: str, config: RunConfig | FitConfig, folder: Path) -> None:
        import wandb

        self._wandb = wandb
        settings = config.model_dump(mode="json", by_alias=True)
        try:
            self._run = wandb.init(project=project, name=config.run.name, config=settings, dir=str(folder))
        except wandb.Error as error:
            raise BadInputError(
                f'log.wandb_project = "{project}": Weights & Biases does not start: {error}. Run '
                "`wandb login`, set WANDB_MODE=offline in the environment, or remove log.wandb_project."
            ) from error

    def metrics(self, step: int, metrics: Metrics) -> None:
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        data = [[row.query, row.response, row.score] for row in rows]
        table = self._wandb.Table(columns=["query", "model response", "score"], data=data)
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_sinks(
    config: RunConfig | FitConfig, folder: RunFolder, last_step: int | None = None
) -> tuple[Sink, ...]:
    """What the configuration asks for. last_step: of the checkpoint that a resumed run starts from."""
    sinks: list[Sink] = [JsonLines(folder, last_step)]
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder.tensorboard))
    if config.log.wandb_project is not None:
        sinks.append(WeightsAndBiases(config.log.wandb_project, config, folder.path))
    return tuple(sinks)
