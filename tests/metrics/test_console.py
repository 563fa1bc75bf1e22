"""The console: one line per step in logs, a live bar on terminals, samples as TRL prints them."""

import io

import pytest
from rich.console import Console

from rl_cluster.metrics.console import (
    LiveConsole,
    PlainConsole,
    SilentConsole,
    open_console,
    sample_table,
    summarise,
    time_left,
)
from rl_cluster.metrics.names import GLOSSARY, describe
from rl_cluster.protocols import SampleRow

METRICS = {
    "objective/scores": 0.5,
    "objective/kl": None,
    "perf/generated_tokens_per_second": 12345.6,
    "perf/step_seconds": 2.0,
}


def text_console():
    return Console(file=io.StringIO(), width=120, highlight=False, force_terminal=False)


def test_a_plain_step_is_one_line():
    console = text_console()
    plain = PlainConsole(10, console)
    plain.phase("generating")
    plain.metrics(4, METRICS)
    assert console.file.getvalue() == "step 4/10  score 0.500  gen tok/s 12,346  s/step 2.00  left 0:12\n"


def test_absent_metrics_are_left_out():
    assert summarise({"objective/scores": 1.0, "objective/kl": None}) == "score 1.000"


def test_an_accuracy_that_is_the_score_stands_once():
    assert summarise({"eval/score_mean": 0.5, "eval/accuracy": 0.5}) == "held-out 0.500"
    assert summarise({"eval/score_mean": 0.7, "eval/accuracy": 0.5}).endswith("held-out accuracy 0.500")
    assert summarise({"eval/accuracy": 0.5}) == "held-out accuracy 0.500"


@pytest.mark.parametrize(
    ("seconds", "left", "expected"),
    [([], 5, "--:--"), ([2.0], 5, "0:10"), ([1.0] * 20 + [3.0] * 10, 10, "0:30"), ([60.0], 61, "1:01:00")],
)
def test_the_time_left_follows_from_the_last_ten_steps(seconds, left, expected):
    assert time_left(seconds, left) == expected


def test_samples_are_a_table_of_query_response_and_score():
    console = text_console()
    console.print(sample_table(7, [SampleRow("[bold]1+1=", "2", 1.0)]))
    shown = console.file.getvalue()
    assert "Samples at step 7" in shown
    for part in ("query", "model response", "score", "[bold]1+1=", "1.000"):
        assert part in shown


def test_the_live_bar_shows_phase_steps_and_summary():
    console = Console(file=io.StringIO(), width=70, force_terminal=True)
    live = LiveConsole(10, console)
    live.phase("training")
    live.metrics(4, {**METRICS, "eval/score_mean": 0.75})
    live.close()
    shown = console.file.getvalue()
    for part in ("training", "4/10", "score 0.500", "s/step 2.00", "held-out 0.750", "left 0:12"):
        assert part in shown


def test_the_console_follows_the_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert isinstance(open_console("auto", 3), PlainConsole)
    assert isinstance(open_console("none", 3), SilentConsole)


def test_every_metric_of_trl_is_in_the_glossary():
    names = {metric.name for metric in GLOSSARY}
    trl = """eps objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward
    objective/scores
    policy/approxkl_avg policy/clipfrac_avg loss/policy_avg loss/value_avg val/clipfrac_avg policy/entropy_avg
    val/ratio val/ratio_var val/num_eos_tokens lr episode perf/step_seconds perf/generate_seconds
    perf/score_seconds perf/reference_seconds perf/train_seconds perf/sync_seconds
    perf/generated_tokens_per_second perf/trained_tokens_per_second health/logprob_gap_mean
    health/logprob_gap_max"""
    assert set(trl.split()) <= names
    assert len(names) == len(GLOSSARY)


@pytest.mark.parametrize(
    ("logged", "entry"),
    [
        ("rewards/exact_match", "rewards/NAME"),
        ("rewards/judge/style", "rewards/NAME/PART"),
        ("eval/pass@16", "eval/pass@K"),
        ("health/rss_bytes/rollout-0", "health/rss_bytes/WORKER"),
        ("objective/kl", "objective/kl"),
        ("eval/pass@x", None),
        ("unheard/of", None),
    ],
)
def test_logged_names_are_found_in_the_glossary(logged, entry):
    found = describe(logged)
    assert (found.name if found else None) == entry
