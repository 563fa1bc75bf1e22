"""Metrics reach metrics.jsonl and TensorBoard with the values that were given."""

import json
import math
import resource

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_cluster.config.reading.load import parse_config
from rl_cluster.errors import BadInputError, CheckpointError
from rl_cluster.metrics.curve import plot_runs, series
from rl_cluster.metrics.observer import RunObserver, open_observer
from rl_cluster.metrics.sink import JsonLines
from rl_cluster.protocols import SampleRow
from rl_cluster.run_folder.folder import RunFolder, create_run_folder


def config_in(folder):
    return parse_config(
        {
            "run": {"dir": str(folder), "steps": 3},
            "model": {"scratch": {}},
            "data": {"train": {"source": "addition"}},
            "rewards": {"scorers": [{"kind": "exact_match"}]},
            "log": {"progress": "none"},
        }
    )


def test_a_full_disk_names_the_file_and_leaves_whole_lines(tmp_path):
    folder = RunFolder(tmp_path)
    with JsonLines(folder) as sink:
        sink.metrics(1, {"objective/scores": 0.5})
        before = folder.metrics.read_text()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Ten bytes more fit, then writing fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"metrics\.jsonl could not be written: .*Free space"):
                sink.metrics(2, {"objective/scores": 0.75})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert folder.metrics.read_text() == before
        sink.metrics(2, {"objective/scores": 0.75})
    assert [row["step"] for row in folder.read_metrics()] == [1, 2]


def test_a_step_is_one_json_object_with_step_and_time(tmp_path):
    folder = RunFolder(tmp_path)
    with JsonLines(folder) as sink:
        sink.metrics(1, {"objective/scores": 0.5, "loss/value_avg": None, "val/ratio": math.nan})
        assert len(folder.metrics.read_text().splitlines()) == 1, "flushed at once"
        sink.metrics(2, {"objective/scores": 0.75})
    first, second = (json.loads(line) for line in folder.metrics.read_text().splitlines())
    assert first.pop("time") <= second.pop("time")
    assert first == {"step": 1, "objective/scores": 0.5, "loss/value_avg": None, "val/ratio": None}
    assert second == {"step": 2, "objective/scores": 0.75}


def test_a_resumed_run_writes_the_later_steps_anew(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"ste')
    with JsonLines(folder, last_step=2) as sink:
        sink.metrics(3, {"a": 30.0})
    assert [(row["step"], row["a"]) for row in folder.read_metrics()] == [(1, 1), (2, 2), (3, 30.0)]


def test_the_observer_writes_json_samples_and_tensorboard(tmp_path):
    config = config_in(tmp_path / "run")
    folder = create_run_folder(config)
    with open_observer(config, folder) as observer:
        observer.phase("generating")
        observer.metrics(1, {"objective/scores": 0.25, "objective/kl": None})
        observer.metrics(2, {"objective/scores": 0.5, "objective/kl": 0.125})
        observer.samples(2, [SampleRow("1+1=", "2|\n", 1.0)])
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("objective/scores")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("objective/kl")] == [(2, 0.125)]
    text = events.Tensors("samples")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[-1] == "| 1+1= | 2\\|⏎ | 1.000 |"
    sample = json.loads(folder.samples.read_text())
    assert sample == {"step": 2, "query": "1+1=", "response": "2|\n", "score": 1.0}


def test_everything_is_closed_when_a_run_fails(tmp_path):
    class Closing:
        closed = 0

        def close(self):
            self.closed += 1

    sink, console = Closing(), Closing()
    with pytest.raises(KeyError), RunObserver([sink], console):
        raise KeyError("x")
    assert (sink.closed, console.closed) == (1, 1)


def test_curves_are_drawn_from_the_steps_that_have_the_metric(tmp_path):
    rows = [{"step": 0, "a": 1.0}, {"step": 1, "a": None}, {"step": 2}, {"step": 3, "a": 0.5}]
    assert series(rows, "a") == ([0.0, 3.0], [1.0, 0.5])
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = plot_runs([folder, folder], tmp_path / "out" / "a.png", ["a", "missing"], title="A")
    assert target.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BadInputError, match="none of the runs has any of missing"):
        plot_runs([folder], tmp_path / "b.png", ["missing"])
